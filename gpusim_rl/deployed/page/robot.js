// An exported policy and its robot in MuJoCo: the control loop of docs/examples/deploy.py, with disturbances.
const sizeOf = shape => shape.reduce((a, b) => a * b, 1);
function each(f, ...args) {  // a batch of one: an input has all numbers, or fewer that repeat
  const order = x => 100 * x.data.length + x.shape.length, most = args.reduce((a, b) => order(b) > order(a) ? b : a);
  const data = new Float32Array(most.data.length);
  for (let i = 0; i < data.length; i++) data[i] = f(...args.map(x => x.data[i % x.data.length]));
  return {data, shape: most.shape};
}
function product(x, weights, bias, rows, inner, outer) {  // weights[j * outer + k * inner], summed in double precision
  const data = new Float32Array(rows);
  for (let j = 0; j < rows; j++) {
    let sum = 0;
    for (let k = 0; k < x.data.length; k++) sum += x.data[k] * weights.data[j * outer + k * inner];
    data[j] = sum + (bias ? bias.data[j % bias.data.length] : 0);
  }
  return {data, shape: [1, rows]};
}
const OPERATIONS = {
  Add: x => each((a, b) => a + b, ...x), Sub: x => each((a, b) => a - b, ...x),
  Mul: x => each((a, b) => a * b, ...x), Div: x => each((a, b) => a / b, ...x),
  Clip: x => each((a, low, high) => Math.min(Math.max(a, low), high), ...x),
  Max: x => each(Math.max, ...x), Min: x => each(Math.min, ...x),
  Pow: x => each((a, b) => a ** b, ...x), Sqrt: x => each(Math.sqrt, ...x),
  Tanh: x => each(Math.tanh, ...x), Relu: x => each(a => Math.max(a, 0), ...x),
  Sigmoid: x => each(a => 1 / (1 + Math.exp(-a)), ...x),
  Elu: (x, {alpha = 1}) => each(a => a > 0 ? a : alpha * Math.expm1(a), ...x),
  MatMul: ([x, w]) => product(x, w, null, w.shape[1], w.shape[1], 1),
  Gemm: ([x, w, b], {transB = 0}) =>
    transB ? product(x, w, b, w.shape[0], 1, w.shape[1]) : product(x, w, b, w.shape[1], w.shape[1], 1),
  Gather: ([x, index], {axis = 0}) => {
    const last = x.shape.length - 1;
    if (axis != last && axis != -1) return {data: x.data, shape: x.shape.slice(1)};  // the only one of an axis
    return {data: Float32Array.from(index.data, i => x.data.at(i)), shape: [1, index.data.length]};
  },
  Slice: ([x, starts, ends, axes, steps]) => starts.data.reduce((x, first, i) => {
    const at = axes ? axes.data[i] : i, axis = at < 0 ? at + x.shape.length : at, by = steps ? steps.data[i] : 1;
    if (by < 1) throw new Error("a slice goes backwards");
    const rows = [...Array(x.shape[axis]).keys()].slice(first, ends.data[i]).filter((_, k) => k % by == 0);
    const shape = x.shape.with(axis, rows.length), inner = sizeOf(shape.slice(axis + 1)), outer = x.shape[axis] * inner;
    const place = k => outer * Math.floor(k / (rows.length * inner)) + inner * rows[Math.floor(k / inner) % rows.length];
    return {data: Float32Array.from({length: sizeOf(shape)}, (_, k) => x.data[place(k) + k % inner]), shape};
  }, x),
  ReduceMean: ([x, of], {axes = of.data, keepdims = 1}) => {
    const last = x.shape.length - 1, mean = x.data.reduce((a, b) => a + b, 0) / x.data.length;
    if (axes.length != 1 || (axes[0] != -1 && axes[0] != last) || x.data.length != x.shape[last])
      throw new Error("only means of one row of numbers are supported");
    return {data: Float32Array.of(mean), shape: keepdims ? x.shape.map(() => 1) : x.shape.slice(0, last)};
  },
  Concat: x => (data => ({data, shape: [1, data.length]}))(Float32Array.from(x.flatMap(v => [...v.data]))),
  Reshape: ([x, to]) => {
    const rest = -x.data.length / sizeOf(to.data);  // for a size of -1
    return {data: x.data, shape: to.data.map(n => n < 0 ? rest : n)};
  },
  Squeeze: ([x]) => ({data: x.data, shape: [x.data.length]}),
  Unsqueeze: ([x]) => ({data: x.data, shape: [1, ...x.shape]}),
};
class Policy {
  constructor(graph, weights, terms) {
    this.graph = graph; this.terms = terms; this.arrays = {};
    for (const [name, {shape, start, list}] of Object.entries(graph.arrays))
      this.arrays[name] = {data: list ?? new Float32Array(weights, 4 * start, sizeOf(shape)), shape};
    this.reset();
  }
  reset() { this.frames = {}; this.action = null; }
  act(values) {  // raw values of each term; returns the control of each actuator
    const joined = [];
    for (const {name, size, scale, history, source} of this.terms) {
      const raw = source == "last action" ? this.action ?? new Float32Array(size) : values[name];
      const factor = Math.fround(scale), frame = Float32Array.from(raw, x => Math.fround(x) * factor);
      const frames = this.frames[name] ??= Array(history).fill(frame);  // the first frame fills the history
      frames.push(frame); frames.shift();
      for (const old of frames) joined.push(...old);
    }
    const [action, control] = this.run(Float32Array.from(joined));
    this.action = action.data;
    return control.data;
  }
  check() {  // on the example: an observation and its action, computed by numpy
    const [obs, expected] = this.graph.example, [action] = this.run(Float32Array.from(obs));
    if (!expected.every((x, i) => Math.abs(x - action.data[i]) <= 1e-3 * Math.max(1, Math.abs(x))))
      throw new Error("its operations compute other actions than in numpy");
  }
  run(obs) {
    const values = {...this.arrays, obs: {data: obs, shape: [1, obs.length]}};
    for (const [name, sources, result, attributes] of this.graph.nodes)
      values[result] = OPERATIONS[name](sources.map(source => values[source]), attributes);
    return this.graph.outputs.map(name => values[name]);
  }
}

const FALLEN = 0.5, STILL = 1e-3;  // cosine of the base's tilt; norm of a command that counts as zero
class Robot {
  constructor(mj, model, card, policy) {
    Object.assign(this, {mj, model, card, policy, data: new mj.MjData(model), scratch: new mj.MjData(model)});
    model.opt.timestep = 1 / card.physics_hz;
    this.substeps = Math.round(card.physics_hz / card.control_hz);
    this.command = Object.fromEntries(Object.keys(card.commands).map(name => [name, 0]));
    this.delay = 0; this.falls = 0; this.grab = null;
    this.joints = Object.fromEntries(card.joints.map(joint => [joint.name, joint]));
    this.columns = card.actuators.map(({name}) => this.column(name));
    this.sensors = {};
    for (const {source} of card.observation.terms) if (source.startsWith("sensor ")) {
      const name = source.slice(7), id = mj.mj_name2id(model, mj.mjtObj.mjOBJ_SENSOR.value, name);
      if (id < 0) throw new Error(`the scene has no sensor ${name}`);
      this.sensors[name] = [model.sensor_adr[id], model.sensor_adr[id] + model.sensor_dim[id]];
    }
    const trees = Array.from(model.dof_bodyid, body => model.body_rootid[body]);
    const size = tree => trees.lastIndexOf(tree) - trees.indexOf(tree);  // objects have fewer joints than the robot
    this.body = trees.reduce((a, b) => size(b) > size(a) ? b : a); this.dof = trees.indexOf(this.body);
    this.friction = model.geom_friction.slice(); this.pairs = model.pair_friction?.slice();
    this.mass = model.body_mass[this.body];
    this.weight = model.body_mass.reduce((a, b) => a + b, 0);
    this.reset();
  }
  column(control) {  // `a` of an actuator, or `a/1` if it has several
    const {mj, model} = this, find = name => mj.mj_name2id(model, mj.mjtObj.mjOBJ_ACTUATOR.value, name);
    const whole = find(control), cut = control.lastIndexOf("/"), id = whole >= 0 ? whole : find(control.slice(0, cut));
    if (id < 0) throw new Error(`the scene has no actuator ${control}`);
    return (model.actuator_ctrladr?.[id] ?? id) + (whole >= 0 ? 0 : Number(control.slice(cut + 1)));
  }
  reset() {
    const {mj, model, data, card} = this;
    mj.mj_resetData(model, data); data.qpos.set(card.start.qpos); data.qvel.set(card.start.qvel);
    this.steps = 0; this.fallen = false; this.queue = []; this.policy.reset(); this.walked = 0;
    mj.mj_forward(model, data);
  }
  axes() { return nine(this.data.xmat, this.body); }  // the base's rotation matrix, row by row
  place() { return three(this.data.xpos, this.body); }
  heading() { const a = this.axes(); return Math.atan2(a[3], a[0]); }
  inBase(v) { return rotate(turned(this.axes()), v); }
  velocity() { return this.inBase(this.data.qvel.slice(this.dof, this.dof + 3)); }
  read(source) {  // sources are listed in docs/export.md
    const {data, card, dof} = this, {qpos, qvel} = data, [first, ...rest] = source.split(" ");
    if (first == "sensor") return data.sensordata.slice(...this.sensors[source.slice(7)]);
    if (source == "joint positions") return card.joints.map(j => qpos[j.qpos]);
    if (source == "joint positions from the pose") return card.joints.map(j => qpos[j.qpos] - (j.pose ?? j.default));
    if (source == "joint velocities") return card.joints.map(j => qvel[j.qvel]);
    if (rest[0] == "of") {
      const joint = this.joints[rest.slice(1).join(" ")], angle = qpos[joint.qpos];
      return [{position: angle, velocity: qvel[joint.qvel], sine: Math.sin(angle), cosine: Math.cos(angle)}[first]];
    }
    if (source == "gravity") return this.inBase([0, 0, -1]);
    if (source == "base velocity") return this.velocity();
    if (source == "base angular velocity") return qvel.slice(dof + 3, dof + 6);  // in the body's frame
    if (first == "command") return rest.map(name => this.command[name]);
    if (first == "phase") {  // sine or cosine, period [s], offset [rad], `standing`, value at a command of zero
      const [wave, period, offset, , standing] = rest, still = Math.hypot(...Object.values(this.command)) < STILL;
      const phase = 2 * Math.PI * this.steps / card.control_hz / period + Number(offset);
      return [still && standing ? Number(standing) : wave == "sine" ? Math.sin(phase) : Math.cos(phase)];
    }
    return null;
  }
  step() {  // one control step
    const {mj, model, data, card} = this, values = {};
    for (const {name, source} of card.observation.terms) if (source != "last action") values[name] = this.read(source);
    const control = this.policy.act(values), before = this.place();
    for (let i = 0; i < this.substeps; i++) {
      this.queue.push(control); this.queue.splice(0, this.queue.length - 1 - Math.round(this.delay * card.physics_hz));
      const {ctrl} = data; this.columns.forEach((column, k) => { ctrl[column] = this.queue[0][k]; });
      this.pull();
      mj.mj_step(model, data);
    }
    const limit = card.max_angular_velocity, {qvel} = data;
    if (limit) for (let j = 0; j < model.njnt; j++) if (model.jnt_type[j] == 0) {
      const k = model.jnt_dofadr[j] + 3, spin = Math.hypot(...qvel.slice(k, k + 3));
      const factor = Math.min(1, limit / Math.max(spin, 1e-9));
      for (let i = k; i < k + 3; i++) qvel[i] *= factor;
    }
    mj.mj_forward(model, data);  // after mj_step, sensors still have the state before it
    this.steps++;
    const now = this.place();
    this.walked += Math.hypot(now[0] - before[0], now[1] - before[1]);
    const down = !now.every(Number.isFinite) || this.axes()[8] < FALLEN;
    if (down && !this.fallen) this.falls++;
    this.fallen ||= down;
  }
  pull() {  // a spring from the grabbed point of a body to the pointer
    const force = this.data.xfrc_applied;
    if (this.held !== undefined) { force.fill(0, 6 * this.held, 6 * this.held + 6); this.held = undefined; }
    if (!this.grab) return;
    const {body, target} = this.grab, from = this.grabbed(), arm = add(from, three(this.data.xipos, body), -1);
    let f = add(target, from, -1).map(x => 20 * this.weight * x);
    const size = Math.hypot(...f), most = 12 * this.weight;  // 1.2 times its weight
    if (size > most) f = f.map(x => x * most / size);
    force.set([...f, ...cross(arm, f)], 6 * body); this.held = body;
  }
  grabbed() {
    const {body, point} = this.grab;
    return add(three(this.data.xpos, body), rotate(nine(this.data.xmat, body), point));
  }
  push(x, y) { const {qvel} = this.data; qvel[this.dof] += x; qvel[this.dof + 1] += y; }  // velocity change [m/s]
  disturb({friction, payload}) {  // factor of all friction coefficients; mass added to the base [kg]
    const {mj, model} = this;
    model.geom_friction.set(this.friction.map(x => x * friction));
    if (this.pairs?.length) model.pair_friction.set(this.pairs.map(x => x * friction));
    model.body_mass[this.body] = this.mass + payload;
    mj.mj_setConst(model, this.scratch);  // masses of subtrees
  }
}
