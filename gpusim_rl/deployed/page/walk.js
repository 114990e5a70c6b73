// The page: unpacks MuJoCo, scene and policy, runs the control loop in real time, and reads keys, sliders and pointer.
const UNITS = {x: ["forward", "m/s"], y: ["left", "m/s"], yaw: ["turn left", "rad/s"]};
const [UP, DOWN, LEFT, RIGHT] = [["x", 1], ["x", -1], ["yaw", 1], ["yaw", -1]];
const KEYS = {ArrowUp: UP, KeyW: UP, ArrowDown: DOWN, KeyS: DOWN, ArrowLeft: LEFT, KeyA: LEFT, ArrowRight: RIGHT,
  KeyD: RIGHT, KeyQ: ["y", 1], KeyE: ["y", -1]};
const LONGEST = 10000;  // of a frame [ms]
const ACCENT = [0.98, 0.42, 0.12, 1], by = id => document.getElementById(id);
const clip = (x, low, high) => Math.min(Math.max(x, low), high);
function element(kind, text, parent, settings = {}) {  // text of the export never becomes HTML
  const made = Object.assign(document.createElement(kind), settings);
  if (text !== "") made.textContent = text;
  parent?.append(made);
  return made;
}
function fail(text) { by("status").hidden = false; by("status").textContent = text; }
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}
function inline(code) { element("script", code, document.head).remove(); }
function inlineFunction(...words) {  // in place of `new Function`, which needs 'unsafe-eval'
  const body = words.pop(); inline(`globalThis.made = function (${words.join()}) {${body}\n}`); return globalThis.made;
}
function slider(parent, name, unit, [low, high], value, changed) {
  const row = element("label", "", parent), head = element("span", name, row), shown = element("output", "", row);
  const input = element("input", "", row, {type: "range", min: low, max: high, step: "any"});
  head.title = unit;
  const show = x => { input.value = x; shown.textContent = `${x.toFixed(high > 9 ? 0 : 2)} ${unit}`; };
  input.addEventListener("input", () => { show(+input.value); changed(+input.value); });
  input.addEventListener("pointerup", () => input.blur());  // arrow keys drive again
  show(value);
  return show;
}

class Walk {
  constructor(robot, picture) {
    Object.assign(this, {robot, picture, pressed: new Set(), rest: {}, show: {}, arrows: []});
    this.speed = [0, 0, 0]; this.since = 0;  // velocity for display; time since a fall [s]
    const {model, data, card} = robot;
    const reach = g => Math.hypot(...add(three(data.geom_xpos, g), robot.place(), -1)) + model.geom_rbound[g];
    const moving = [...Array(model.ngeom).keys()].filter(g => model.body_weldid[model.geom_bodyid[g]] != 0);
    this.radius = Math.max(0.05, ...moving.map(reach));
    this.camera = {azimuth: 2.3, elevation: 0.3, distance: 3.2 * this.radius, shift: [0, 0]};
    this.follow();
    for (const [name, range] of Object.entries(card.commands)) {
      const [low, high] = range ?? [-1, 1], [words, unit] = UNITS[name] ?? [name, ""];
      robot.command[name] = this.rest[name] = clip(0, low, high);
      const changed = x => { this.rest[name] = robot.command[name] = x; };
      this.show[name] = slider(by("commands"), words, unit, [low, high], this.rest[name], changed);
    }
    by("commands").hidden = by("hint").hidden = by("stick").hidden = !Object.keys(card.commands).length;
    const world = {friction: 1, payload: 0}, changed = name => x => { world[name] = x; robot.disturb(world); };
    slider(by("world"), "friction", "×", [0.1, 2], 1, changed("friction"));
    slider(by("world"), "payload", "kg", [0, Math.round(0.5 * robot.weight) || 1], 0, changed("payload"));
    slider(by("world"), "delay", "ms", [0, 100], 0, x => { robot.delay = x / 1000; });
    let size = 1; slider(by("world"), "push", "m/s", [0, 4], 1, x => { size = x; });
    by("push").onclick = () => {
      const way = Math.random() * 2 * Math.PI; this.push(size * Math.cos(way), size * Math.sin(way));
    };
    by("pause").onclick = () => {
      this.paused = !this.paused; by("pause").textContent = this.paused ? "Resume" : "Pause";
    };
    by("reset").onclick = () => { robot.reset(); this.follow(); };
    this.listen();
  }
  push(x, y) {
    const {robot, radius} = this, way = unit([x, y, 0]), end = add(robot.place(), way, -0.3 * radius);
    const from = add(end, way, -radius * (0.3 + 0.3 * Math.hypot(x, y)));
    robot.push(x, y); this.arrows.push({left: 0.6, sign: [from, end, 0.03 * radius, ACCENT]});
  }
  follow() { Object.assign(this.camera, {target: this.robot.place(), heading: this.robot.heading()}); }
  drive() {  // keys and stick go before the sliders
    for (const [name, range] of Object.entries(this.robot.card.commands)) {
      const [low, high] = range ?? [-1, 1];
      let way = this.stick?.[name] ?? 0;
      for (const code of this.pressed) if (KEYS[code][0] == name) way += KEYS[code][1];
      const value = way > 0 ? clip(way * high, low, high) : way < 0 ? clip(-way * low, low, high) : this.rest[name];
      if (this.driving || way) { this.robot.command[name] = value; this.show[name](value); }
    }
    this.driving = this.pressed.size > 0 || !!this.stick;
  }
  listen() {
    const canvas = by("canvas"), pointers = new Map(), {robot, camera} = this;
    const ended = (part, done) => ["pointerup", "pointercancel"].forEach(kind => part.addEventListener(kind, done));
    const spread = () => { const [a, b] = [...pointers.values()]; return Math.hypot(a[0] - b[0], a[1] - b[1]); };
    addEventListener("keydown", event => {
      const native = event.target.matches("button, summary, pre, input") && !event.code.startsWith("Key");
      if (event.ctrlKey || event.metaKey || event.altKey || native) return;
      if (event.code in KEYS) this.pressed.add(event.code);
      else if (event.code == "Space") by("pause").click();
      else if (event.code == "KeyR") by("reset").click();
      else if (event.code == "KeyP") by("push").click();
      else return;
      event.preventDefault(); this.drive();
    });
    addEventListener("keyup", event => { if (this.pressed.delete(event.code)) this.drive(); });
    addEventListener("blur", () => { this.pressed.clear(); this.drive(); });
    canvas.addEventListener("pointerdown", event => {
      canvas.setPointerCapture(event.pointerId); pointers.set(event.pointerId, [event.clientX, event.clientY]);
      if (pointers.size == 1 && this.picture) this.pick(event.clientX, event.clientY); else robot.grab = null;
    });
    canvas.addEventListener("pointermove", event => {
      if (!pointers.has(event.pointerId)) return;
      const [x, y] = pointers.get(event.pointerId), now = [event.clientX, event.clientY];
      const before = pointers.size > 1 && spread();
      pointers.set(event.pointerId, now);
      if (pointers.size > 1) this.zoom(before / Math.max(spread(), 1));
      else if (robot.grab) this.pull(...now);
      else {
        camera.azimuth -= 0.008 * (now[0] - x);
        camera.elevation = clip(camera.elevation + 0.008 * (now[1] - y), -0.05, 1.5);
      }
    });
    ended(canvas, event => { pointers.delete(event.pointerId); robot.grab = null; });
    const wheel = event => { event.preventDefault(); this.zoom(Math.exp(0.001 * event.deltaY)); };
    canvas.addEventListener("wheel", wheel, {passive: false});
    const stick = by("stick"), knob = stick.firstElementChild, steer = event => {
      const box = stick.getBoundingClientRect(), from = [event.clientX - box.left, event.clientY - box.top];
      const [x, y] = from.map(v => clip(2 * v / box.width - 1, -1, 1));
      this.stick = {x: -y, yaw: -x}; knob.style.translate = `${30 * x}px ${30 * y}px`; this.drive();
    };
    stick.addEventListener("pointerdown", event => { stick.setPointerCapture(event.pointerId); steer(event); });
    stick.addEventListener("pointermove", event => { if (this.stick) steer(event); });
    ended(stick, () => { this.stick = null; knob.style.translate = "0px 0px"; this.drive(); });
  }
  zoom(factor) { this.camera.distance = clip(this.camera.distance * factor, 1.5 * this.radius, 25 * this.radius); }
  pick(x, y) {  // the nearest moving geom whose bounding sphere the pointer's ray meets
    const {model, data} = this.robot, [eye, way] = this.picture.ray(x, y, this.camera);
    let nearest = Infinity;
    for (const {g} of this.picture.geoms) {
      const body = model.geom_bodyid[g], centre = add(three(data.geom_xpos, g), eye, -1), along = dot(centre, way);
      const miss = Math.hypot(...add(centre, way, -along)), r = model.geom_rbound[g];
      if (model.body_weldid[body] == 0 || along < 0 || along - r > nearest) continue;
      if (miss > Math.max(r, 0.05 * this.radius)) continue;
      nearest = along - r;
      const target = add(eye, way, along), from = add(target, three(data.xpos, body), -1);
      this.robot.grab = {body, target, point: rotate(turned(nine(data.xmat, body)), from)};
    }
  }
  pull(x, y) {
    const [eye, way] = this.picture.ray(x, y, this.camera), {robot} = this, {back} = this.picture.seen;
    robot.grab.target = add(eye, way, dot(add(robot.grabbed(), eye, -1), back) / dot(way, back));
  }
  advance(seconds) {  // simulated time
    const {robot} = this, dt = 1 / robot.card.control_hz;
    for (let left = Math.round(seconds / dt); left > 0; left--) {
      robot.step();
      this.speed = robot.velocity().map((v, i) => this.speed[i] + 0.06 * (v - this.speed[i]));
      this.since = robot.fallen ? this.since + dt : 0;
      if (this.since > 2) by("reset").click();
      this.arrows = this.arrows.filter(arrow => (arrow.left -= dt) > 0);
    }
  }
  draw() {
    const {robot, picture, camera, radius} = this, p = robot.place(), away = robot.heading() - camera.heading;
    if (p.every(Number.isFinite)) {
      camera.target = camera.target.map((x, i) => x + (i == 2 ? 0.06 : 0.2) * (p[i] - x));
      camera.heading += 0.04 * Math.atan2(Math.sin(away), Math.cos(away));
    }
    const side = innerWidth > 760 ? by("panel").offsetWidth : 0;  // at the right, or below
    camera.shift = side ? [side / innerWidth, 0] : [0, -0.4];
    const a = camera.azimuth + camera.heading, b = camera.elevation, room = 0.84 * innerHeight / (innerWidth - side);
    const way = [Math.cos(a) * Math.cos(b), Math.sin(a) * Math.cos(b), Math.sin(b)];
    camera.eye = add(camera.target, way, Math.max(1, room) * camera.distance);
    camera.eye[2] = Math.max(camera.eye[2], 0.03);
    const signs = this.arrows.map(arrow => arrow.sign);
    if (robot.grab) signs.push([robot.grabbed(), robot.grab.target, 0.02 * radius, ACCENT]);
    picture?.draw(robot.data, camera, radius, signs, matchMedia("(prefers-color-scheme: dark)").matches);
    by("speed").textContent = Math.hypot(this.speed[0], this.speed[1]).toFixed(2);
    by("walked").textContent = robot.walked.toFixed(1); by("falls").textContent = robot.falls;
    by("clock").textContent = (robot.steps / robot.card.control_hz).toFixed(1);
    by("down").hidden = !robot.fallen;
  }
  start() {
    const {card} = this.robot;
    let last = performance.now(), owed = 0, slow = 0;
    const frame = now => {
      slow = 0.9 * slow + 0.1 * Math.min(now - last, 200);  // mean interval of frames [ms]
      if (slow > 45 && this.picture?.quality > 0) { this.picture.quality--; slow = 0; }
      owed = Math.min(owed + (now - last) / 1000, 0.2); last = now;
      const steps = Math.floor(owed * card.control_hz); owed -= steps / card.control_hz;
      if (!this.paused) this.advance(steps / card.control_hz);
      if (performance.now() - now > LONGEST) throw new Error("the scene is too large for a browser");
      this.draw();
    };
    const loop = now => {
      try { if (!this.held) frame(now); } catch (error) { return fail(`Stopped: ${error.message ?? error}`); }
      requestAnimationFrame(loop);
    };
    requestAnimationFrame(loop);
  }
}
function describe(card) {
  by("title").textContent = card.task;
  const trained = card.algorithm ? ` trained by ${String(card.algorithm).toUpperCase()}` : "";
  by("subtitle").textContent = `A policy${trained}, running in your browser ${card.control_hz} times a second`;
  const rows = (id, list) => list.forEach(words => {
    const row = element("tr", "", by(id));
    words.forEach(word => element("td", String(word ?? ""), row));
  });
  const sizes = t => t.history > 1 ? `${t.size} × ${t.history}` : t.size;
  rows("terms", card.observation.terms.map(t => [t.name, sizes(t), t.unit, t.source]));
  rows("drives", card.actuators.map(a => [a.joint ?? a.name, a.kp?.toFixed(1), a.kd?.toFixed(2)]));
  by("whole").textContent = JSON.stringify(card, null, 1);
}
async function main() {
  const page = JSON.parse(by("data").textContent);
  const text = async part => new TextDecoder().decode(await unpack(page[part]));
  if (typeof WebAssembly != "object" || typeof DecompressionStream != "function")
    return fail("This page needs a browser with WebAssembly and DecompressionStream, of 2023 or newer");
  try {
    const card = JSON.parse(await text("card")), graph = JSON.parse(await text("graph"));
    describe(card); by("licence").textContent = await text("licence");
    inline(await text("code"));
    const mj = await loadMujoco({wasmBinary: await unpack(page.wasm), print: () => {}, printErr: () => {}});
    mj.FS.mkdir("/assets");
    for (const name in page.scene) mj.FS.writeFile("/" + name, new Uint8Array(await unpack(page.scene[name])));
    const model = mj.MjModel.from_xml_path("/scene.xml");
    const policy = new Policy(graph, await unpack(page.weights), card.observation.terms);
    policy.check();  // an unsupported network fails here, not in a later step
    const robot = new Robot(mj, model, card, policy);
    let picture = null;
    by("status").hidden = true;
    const looks = page.looks && JSON.parse(await text("looks"));
    try { picture = new Picture(by("canvas"), model, looks, looks && await unpack(page.skin)); } catch (error) { fail(error.message); }
    const walk = new Walk(robot, picture);
    walk.start();
    // For tests and scripts: stop the clock, advance simulated time, set the command, push.
    window.walk = Object.assign(walk, {
      hold() { this.held = true; },
      command(values) {
        for (const each of [robot.command, this.rest]) Object.assign(each, values);
        for (const name in values) this.show[name](values[name]);
      },
      state: () => ({time: robot.steps / card.control_hz, place: robot.place(), falls: robot.falls}),
    });
  } catch (error) { fail(`This page cannot run here: ${error.message ?? error}`); }
}
main();
