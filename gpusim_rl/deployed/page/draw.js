// WebGL 2 drawing of a MuJoCo scene: one directional light with soft shadows, a sky, and a grid on the ground.
const VERTEX = `#version 300 es
layout(location=0) in vec3 at; layout(location=1) in vec3 facing;
uniform mat4 view, light; uniform mat3 turn; uniform vec3 place, scale; uniform float stretch;
out vec3 point, normal; out vec4 shade;
void main() {
  vec3 p = at * scale; p.z += stretch * sign(at.z);  // a capsule is a sphere with its halves moved apart
  point = turn * p + place; normal = turn * (facing / scale);
  shade = light * vec4(point + 0.004 * normalize(normal), 1.0);
  gl_Position = view * vec4(point, 1.0);
}`;
const FRAGMENT = `#version 300 es
precision highp float; precision highp sampler2DShadow;
in vec3 point, normal; in vec4 shade; out vec4 pixel;
uniform sampler2DShadow shadows; uniform vec4 colour; uniform vec3 eye, sun, middle, horizon, zenith, line;
uniform float far; uniform int kind, soft;  // 0: shape, 1: ground, 2: sky, 3: sign, without shading
float lit() {
  vec3 s = shade.xyz / shade.w * 0.5 + 0.5; float sum = 0.0;
  if (s.x < 0.0 || s.y < 0.0 || s.x > 1.0 || s.y > 1.0 || s.z > 1.0) return 1.0;
  for (int i = -soft; i <= soft; i++) for (int j = -soft; j <= soft; j++)
    sum += texture(shadows, vec3(s.xy + vec2(i, j) * 0.0018 / float(max(soft, 1)), s.z - 0.0012));
  return sum / float((2 * soft + 1) * (2 * soft + 1));
}
float grid(float cell) {
  vec2 g = point.xy / cell, w = fwidth(g), d = abs(fract(g - 0.5) - 0.5) / max(w, vec2(1e-6));
  return (1.0 - min(min(d.x, d.y) / 1.4, 1.0)) * clamp(0.5 / max(w.x, w.y) - 1.0, 0.0, 1.0);
}
vec3 sky(float up) { return mix(horizon, zenith, smoothstep(-0.05, 0.55, up)); }
void main() {
  vec3 away = point - eye, base = pow(colour.rgb, vec3(2.2)), result; vec3 v = -normalize(away);
  if (kind == 2) { pixel = vec4(sky(-v.z), 1.0); return; }
  if (kind == 3) { pixel = colour; return; }
  vec3 n = normalize(normal); float sunny = max(dot(n, sun), 0.0); if (sunny > 0.0) sunny *= lit();
  if (kind == 1) {
    float near = 1.0 - smoothstep(0.1 * far, 0.6 * far, distance(point.xy, middle.xy));
    base = mix(base, pow(line, vec3(2.2)), near * max(0.9 * grid(1.0), 0.35 * grid(0.2)));
    result = base * (0.56 + 0.5 * sunny / max(sun.z, 0.1));
  } else {
    vec3 around = mix(pow(colour.rgb, vec3(2.2)) * 0.2 + 0.06, pow(zenith, vec3(2.2)) * 0.8 + 0.12, 0.5 + 0.5 * n.z);
    float rim = pow(1.0 - max(dot(n, v), 0.0), 4.0), gleam = pow(max(dot(n, normalize(sun + v)), 0.0), 48.0);
    result = base * (around + 0.95 * sunny * vec3(1.0, 0.97, 0.92)) + 0.2 * gleam * sunny + 0.1 * rim * around;
    result = 1.0 - exp(-1.25 * result);
  }
  result = pow(result, vec3(1.0 / 2.2));
  if (kind == 1) result = mix(result, sky(-0.05), smoothstep(0.25 * far, far, distance(point.xy, middle.xy)));
  pixel = vec4(result, colour.a);
}`;
const LIGHT = {horizon: [.91, .93, .95], zenith: [.66, .76, .87], ground: [.8, .83, .86], line: [.66, .7, .75]};
const DARK = {horizon: [.085, .1, .125], zenith: [.17, .21, .28], ground: [.16, .185, .22], line: [.27, .31, .37]};
const SHADOW = 1536, FAR = 22, FOCAL = 1 / Math.tan(Math.PI / 8);
const add = (a, b, k = 1) => a.map((x, i) => x + k * b[i]), dot = (a, b) => a.reduce((s, x, i) => s + x * b[i], 0);
const cross = (a, b) => [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]];
const three = (array, i) => [...array.slice(3 * i, 3 * i + 3)], nine = (array, i) => [...array.slice(9 * i, 9 * i + 9)];
const turned = t => [t[0], t[3], t[6], t[1], t[4], t[7], t[2], t[5], t[8]];  // transposed
const rotate = (t, v) => [0, 3, 6].map(i => t[i] * v[0] + t[i + 1] * v[1] + t[i + 2] * v[2]);
const unit = a => { const l = Math.hypot(...a) || 1; return a.map(x => x / l); };
function times(a, b) {  // of 4x4 matrices, by columns
  const entry = (_, i) => [0, 1, 2, 3].reduce((s, k) => s + a[4 * k + i % 4] * b[4 * (i >> 2) + k], 0);
  return Float32Array.from({length: 16}, entry);
}
function looking(eye, target) {
  const back = unit(add(eye, target, -1)), right = unit(cross([0, 0, 1], back)), up = cross(back, right);
  const columns = [0, 1, 2].flatMap(i => [right[i], up[i], back[i], 0]);
  return {right, up, back, matrix: [...columns, -dot(right, eye), -dot(up, eye), -dot(back, eye), 1]};
}
function sphere(rings = 10, sides = 24) {  // with the equator twice, for capsules; the only shape with shared vertices
  const angles = [], rows = [], index = [];
  for (let i = 0; i <= rings; i++) angles.push(...2 * i == rings ? [1e-6, -1e-6] : [Math.PI * (0.5 - i / rings)]);
  for (const a of angles) for (let j = 0; j <= sides; j++) {
    const b = 2 * Math.PI * j / sides, p = [Math.cos(a) * Math.cos(b), Math.cos(a) * Math.sin(b), Math.sin(a)];
    rows.push(...p, ...p);
  }
  for (let k = 0, next = sides + 1; k < (angles.length - 1) * next - 1; k++)
    index.push(k, k + next, k + next + 1, k, k + next + 1, k + 1);
  return [new Float32Array(rows), new Uint16Array(index)];
}
function box() {
  const out = [];
  const corners = [[-1, -1], [1, -1], [1, 1], [-1, -1], [1, 1], [-1, 1]];
  for (const axis of [0, 1, 2]) for (const side of [-1, 1]) for (const [u, v] of corners) {
    const p = [0, 0, 0], n = [0, 0, 0];
    n[axis] = p[axis] = side; p[(axis + 1) % 3] = u; p[(axis + 2) % 3] = v; out.push(...p, ...n);
  }
  return new Float32Array(out);
}
function cylinder(top = 1, sides = 40) {  // or a cone
  const out = [], flat = p => [p[0], p[1], 0], at = (j, z) => {
    const b = 2 * Math.PI * j / sides, r = z > 0 ? top : 1; return [r * Math.cos(b), r * Math.sin(b), z];
  };
  for (let j = 0; j < sides; j++) {
    const [a, b, c, d] = [at(j, -1), at(j + 1, -1), at(j + 1, 1), at(j, 1)];
    for (const p of [a, b, c, a, c, d]) out.push(...p, ...flat(p));
    for (const [z, p, q] of [[-1, b, a], [1, d, c]]) for (const r of [[0, 0, z], p, q]) out.push(...r, 0, 0, z);
  }
  return new Float32Array(out);
}
function meshOf(m, id) {
  const out = [], points = m.mesh_vert, normals = m.mesh_normal, face = m.mesh_face, facing = m.mesh_facenormal;
  const start = 3 * m.mesh_faceadr[id], end = start + 3 * m.mesh_facenum[id];
  for (let i = start; i < end; i++)
    out.push(...three(points, m.mesh_vertadr[id] + face[i]), ...three(normals, m.mesh_normaladr[id] + facing[i]));
  return new Float32Array(out);
}
function terrain(m, id) {
  const rows = m.hfield_nrow[id], columns = m.hfield_ncol[id], [x, y, z] = m.hfield_size.slice(4 * id, 4 * id + 3);
  const heights = m.hfield_data.slice(m.hfield_adr[id], m.hfield_adr[id] + rows * columns), out = [];
  const at = (r, c) => [x * (2 * c / (columns - 1) - 1), y * (2 * r / (rows - 1) - 1), z * heights[r * columns + c]];
  for (let r = 0; r < rows - 1; r++) for (let c = 0; c < columns - 1; c++) for (const [p, q, s] of [
    [at(r, c), at(r, c + 1), at(r + 1, c + 1)], [at(r, c), at(r + 1, c + 1), at(r + 1, c)]]) {
    const n = cross(add(q, p, -1), add(s, p, -1)); out.push(...p, ...n, ...q, ...n, ...s, ...n);
  }
  return new Float32Array(out);
}

function* skinned({unit, parts}, numbers) {  // meshes of bodies: 16-bit vertices of all, then 16-bit faces of all
  let from = 0, start = 6 * parts.reduce((sum, part) => sum + part[2], 0);
  for (const [body, colour, vertices, faces] of parts) {
    const points = new Int16Array(numbers, from, 3 * vertices), index = new Uint16Array(numbers, start, 3 * faces);
    const rows = new Float32Array(6 * vertices), at = i => [...points.subarray(3 * i, 3 * i + 3)];
    for (let i = 0; i < vertices; i++) rows.set(at(i).map(x => unit * x), 6 * i);
    for (let f = 0; f < 3 * faces; f += 3) {
      const [p, q, s] = [...index.subarray(f, f + 3)].map(at), n = cross(add(q, p, -1), add(s, p, -1));
      for (let k = 0; k < 3; k++) for (let j = 0; j < 3; j++) rows[6 * index[f + k] + 3 + j] += n[j] * unit;
    }
    yield {body, colour, rows, index}; from += 6 * vertices; start += 6 * faces;
  }
}

class Picture {
  constructor(canvas, model, looks, skin) {
    this.canvas = canvas;
    const fast = canvas.getContext("webgl2", {antialias: true, alpha: false, failIfMajorPerformanceCaveat: true});
    const gl = this.gl = fast ?? canvas.getContext("webgl2", {antialias: false, alpha: false});  // drawn on the CPU
    if (!gl) throw new Error("no WebGL 2 in this browser: the robot is simulated, but not drawn");
    const program = this.program = gl.createProgram();
    for (const [kind, text] of [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, FRAGMENT]]) {
      const shader = gl.createShader(kind);
      gl.shaderSource(shader, text); gl.compileShader(shader); gl.attachShader(program, shader);
    }
    gl.linkProgram(program);
    if (!gl.getProgramParameter(program, gl.LINK_STATUS))
      throw new Error("WebGL cannot compile the shaders here: the robot is simulated, but not drawn");
    gl.useProgram(program);
    const at = this.at = {};
    for (let i = 0; i < gl.getProgramParameter(program, gl.ACTIVE_UNIFORMS); i++) {
      const {name} = gl.getActiveUniform(program, i); at[name] = gl.getUniformLocation(program, name);
    }
    const map = this.map = gl.createTexture(); gl.bindTexture(gl.TEXTURE_2D, map);
    gl.texStorage2D(gl.TEXTURE_2D, 1, gl.DEPTH_COMPONENT24, SHADOW, SHADOW);
    gl.texParameteri(gl.TEXTURE_2D, gl.TEXTURE_COMPARE_MODE, gl.COMPARE_REF_TO_TEXTURE);
    for (const key of [gl.TEXTURE_MIN_FILTER, gl.TEXTURE_MAG_FILTER]) gl.texParameteri(gl.TEXTURE_2D, key, gl.LINEAR);
    this.shadows = gl.createFramebuffer(); gl.bindFramebuffer(gl.FRAMEBUFFER, this.shadows);
    gl.framebufferTexture2D(gl.FRAMEBUFFER, gl.DEPTH_ATTACHMENT, gl.TEXTURE_2D, map, 0);
    this.shapes = {}; this.sun = unit([-0.42, 0.38, 1]); this.quality = fast ? 2 : 0;
    this.keep("sphere", ...sphere());
    this.keep("box", box()); this.keep("cylinder", cylinder()); this.keep("cone", cylinder(0));
    this.geoms = []; this.skins = [];
    for (const {body, colour, rows, index} of looks ? skinned(looks, skin) : []) {
      const shape = `skin${this.skins.length}`; this.keep(shape, rows, index); this.skins.push({body, colour, shape});
    }
    for (let g = 0; g < model.ngeom; g++) this.prepare(model, g);
  }
  keep(name, rows, index = null) {
    const {gl} = this, vertices = gl.createVertexArray(); gl.bindVertexArray(vertices);
    const fill = (kind, of) => { gl.bindBuffer(kind, gl.createBuffer()); gl.bufferData(kind, of, gl.STATIC_DRAW); };
    fill(gl.ARRAY_BUFFER, rows);
    for (const i of [0, 1]) {
      gl.enableVertexAttribArray(i); gl.vertexAttribPointer(i, 3, gl.FLOAT, false, 24, 12 * i);
    }
    if (index) fill(gl.ELEMENT_ARRAY_BUFFER, index);
    this.shapes[name] = {vertices, index, count: (index ?? rows).length / (index ? 1 : 6)};
  }
  prepare(m, g) {
    const kind = m.geom_type[g], id = m.geom_dataid[g], [a, b, c] = three(m.geom_size, g), material = m.geom_matid[g];
    if (m.geom_group[g] > 2) return;
    const [from, k] = material >= 0 ? [m.mat_rgba, material] : [m.geom_rgba, g], colour = from.slice(4 * k, 4 * k + 4);
    if (colour[3] <= 0) return;
    const r = a * (1 - 0.008 * (g % 5));  // surfaces that coincide would flicker
    const [shape, scale, stretch = 0] = {
      0: ["plane"], 1: ["terrain" + id, [1, 1, 1]], 2: ["sphere", [r, r, r]], 3: ["sphere", [r, r, r], b],
      4: ["sphere", [a, b, c]], 5: ["cylinder", [a, a, b]], 6: ["box", [a, b, c]], 7: ["mesh" + id, [1, 1, 1]],
    }[kind] ?? [];
    if (!shape) return;
    if (kind == 1 || kind == 7) this.shapes[shape] || this.keep(shape, (kind == 1 ? terrain : meshOf)(m, id));
    this.geoms.push({g, shape, scale, stretch, colour, size: [a || 4 * FAR, b || 4 * FAR],
      worn: this.skins.some(skin => skin.body == m.geom_bodyid[g])});
  }
  put(shape, place, turn, scale, stretch, colour, kind) {
    const {gl, at} = this;
    gl.uniformMatrix3fv(at.turn, false, turn); gl.uniform3fv(at.place, place); gl.uniform3fv(at.scale, scale);
    gl.uniform1f(at.stretch, stretch); gl.uniform4fv(at.colour, colour); gl.uniform1i(at.kind, kind);
    const {vertices, index, count} = this.shapes[shape]; gl.bindVertexArray(vertices);
    if (index) gl.drawElements(gl.TRIANGLES, count, gl.UNSIGNED_SHORT, 0); else gl.drawArrays(gl.TRIANGLES, 0, count);
  }
  solids(data, planes) {
    const places = data.geom_xpos, turns = data.geom_xmat, bodies = data.xpos, ways = data.xmat;
    for (const {body, colour, shape} of this.skins)
      this.put(shape, three(bodies, body), turned(nine(ways, body)), [1, 1, 1], 0, colour, planes ? 0 : 3);
    for (const {g, shape, scale, stretch, colour, size, worn} of this.geoms) {
      if (worn) continue;  // a skin is drawn instead
      const place = three(places, g), turn = turned(nine(turns, g));  // columns, as WebGL has them
      if (shape != "plane") this.put(shape, place, turn, scale, stretch, colour, planes ? 0 : 3);
      else if (planes) this.put("box", add(place, turn.slice(6), -0.01), turn, [...size, 0.01], 0, [...planes, 1], 1);
    }
  }
  // Draws the scene as seen by `camera` {eye, target, shift}; `signs` are arrows [from, to, radius, colour].
  draw(data, camera, radius, signs, dark) {
    const {gl, at, canvas} = this, {eye, target, shift} = camera, look = dark ? DARK : LIGHT;
    const ratio = Math.min(devicePixelRatio || 1, [0.6, 1, 2][this.quality]);
    const [width, height] = [canvas.clientWidth, canvas.clientHeight].map(n => Math.max(1, Math.round(n * ratio)));
    if (canvas.width != width || canvas.height != height) [canvas.width, canvas.height] = [width, height];
    const near = 0.2 * Math.hypot(...add(eye, target, -1)), most = 8 * FAR, wide = 2.2 * radius, depth = near - most;
    const projection = [FOCAL * height / width, 0, 0, 0, 0, FOCAL, 0, 0, ...shift, (most + near) / depth, -1, 0, 0,
      2 * most * near / depth, 0];
    this.seen = looking(eye, target);
    const view = times(projection, this.seen.matrix), sun = looking(add(target, this.sun, 4 * wide), target);
    const light = times([1 / wide, 0, 0, 0, 0, 1 / wide, 0, 0, 0, 0, -0.25 / wide, 0, 0, 0, -1, 1], sun.matrix);
    gl.enable(gl.DEPTH_TEST); gl.enable(gl.BLEND); gl.blendFunc(gl.SRC_ALPHA, gl.ONE_MINUS_SRC_ALPHA);
    gl.uniformMatrix4fv(at.light, false, light); gl.uniform1i(at.soft, this.quality);
    gl.uniform1f(at.far, Math.max(FAR, 12 * radius));
    const {ground, ...colours} = look, vectors = {sun: this.sun, eye, middle: target, ...colours};
    for (const key in vectors) gl.uniform3fv(at[key], vectors[key]);
    gl.bindTexture(gl.TEXTURE_2D, null);  // a texture cannot be read and drawn to at once
    gl.bindFramebuffer(gl.FRAMEBUFFER, this.shadows); gl.viewport(0, 0, SHADOW, SHADOW); gl.clear(gl.DEPTH_BUFFER_BIT);
    gl.uniformMatrix4fv(at.view, false, light); gl.colorMask(false, false, false, false);
    this.solids(data, null);
    gl.bindTexture(gl.TEXTURE_2D, this.map);
    gl.bindFramebuffer(gl.FRAMEBUFFER, null); gl.viewport(0, 0, width, height); gl.colorMask(true, true, true, true);
    gl.clear(gl.COLOR_BUFFER_BIT | gl.DEPTH_BUFFER_BIT); gl.uniformMatrix4fv(at.view, false, view);
    const turn = [1, 0, 0, 0, 1, 0, 0, 0, 1];
    gl.depthMask(false); this.put("sphere", eye, turn, [9, 9, 9], 0, [0, 0, 0, 1], 2); gl.depthMask(true);
    this.solids(data, ground);
    for (const [from, to, thick, colour] of signs) {
      const way = add(to, from, -1), z = unit(way), x = unit(cross(Math.abs(z[2]) < 0.9 ? [0, 0, 1] : [1, 0, 0], z));
      const frame = [...x, ...cross(z, x), ...z], half = Math.hypot(...way) / 2;
      const head = Math.min(3 * thick, half), shaft = half - head;
      this.put("cylinder", add(from, z, shaft), frame, [thick, thick, shaft], 0, colour, 3);
      this.put("cone", add(to, z, -head), frame, [0.8 * head, 0.8 * head, head], 0, colour, 3);
    }
  }
  // Returns the ray through a pixel of the page: origin and direction.
  ray(x, y, camera) {
    const {right, up, back} = this.seen, box = this.canvas.getBoundingClientRect();
    const u = (2 * (x - box.left) / box.width - 1 + camera.shift[0]) * box.width / box.height / FOCAL;
    const v = (1 - 2 * (y - box.top) / box.height + camera.shift[1]) / FOCAL;
    return [camera.eye, unit(add(add(right.map(r => r * u), up, v), back, -1))];
  }
}
