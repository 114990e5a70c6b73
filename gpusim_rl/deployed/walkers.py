"""Batch of robots in plain MuJoCo, driven by an exported policy, with disturbances per robot."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import mujoco
import numpy as np
from mujoco.batch import Batch

from gpusim_rl.errors import ConfigError, UserError
from gpusim_rl.export import CARD
from gpusim_rl.export.policy import load_network
from gpusim_rl.files.safe_open import read_bytes
from gpusim_rl.machine.hardware import available_cpus
from gpusim_rl.sim.actuators import control_names
from gpusim_rl.sim.robot_xml import bounded_memory, read_mjcf

TORSO = ("torso", "trunk", "pelvis", "base")  # part of the name of the body that forces and payloads act on
FALLEN = 0.6  # height of the base, relative to standing, below which a robot has fallen
TILTED = 0.5  # z of the base's up axis below which a robot has fallen: 60 degrees
STILL = 1e-3  # norm of a command that counts as zero
MAX_DELAY = 10  # [control steps]
MIN_HZ, MAX_HZ, MAX_SUBSTEPS = 10.0, 2000.0, 1000  # control rate [Hz]; physics steps in a control step
_VEL = mujoco.mjtStage.mjSTAGE_VEL.value

Read = Callable[[np.ndarray], np.ndarray]
"""Observation source: values of the robots with the given indices, [robots, size]."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors from a damaged export inside the block into a one-line ConfigError."""
    try:
        yield
    except UserError as error:
        raise ConfigError(str(error), key=str(path)) from None
    except Exception as error:  # onnxruntime's and MuJoCo's classes have no common base
        text = " ".join(str(error).split())[:300] or type(error).__name__
        problem = f"no entry {text}" if isinstance(error, KeyError) else text
        raise ConfigError(f"damaged export: {problem}", key=str(path), hint="Try gpusim-rl export") from None


class Walkers:
    """Batch of robots driven by one exported policy; bit-identical for any number of threads.

    Arrays have a row per robot, and callers write to `command`, `force`, `delay`, `noise`, `down` and `vary(...)`.

    Args:
        folder: Export folder; nothing in it is executed.
        num: Number of robots.
        seed: Seed of the observation noise.

    Raises:
        ConfigError: The folder is no export, is damaged, or its robot has no free base.
    """

    def __init__(self, folder: Path, num: int, seed: int = 0) -> None:
        self.folder, self.num = folder, num
        self.policy: Literal["file", "zero", "hold"] = "file"  # or a baseline: action 0, or the start pose as target
        if not (folder / CARD).is_file():
            raise ConfigError(f"no {CARD} in this folder", key=str(folder), hint="Try gpusim-rl export")
        with reading(folder), bounded_memory():
            self.card: dict[str, Any] = json.loads(read_bytes(folder / CARD))
            self.control_hz, self.dt = float(self.card["control_hz"]), 1.0 / float(self.card["control_hz"])
            self.commands = [*self.card["commands"]]
            self._run = load_network(folder, self.card["files"], providers=["CPUExecutionProvider"])
            self._read_scene()
            self._read_actuators()
            self._allocate()
            self._noise = np.random.default_rng(seed)
            self._readers = [self._reader(term["source"].split()) for term in self.terms]
            self._check()
            self.reset()

    def _read_scene(self) -> None:
        spec = read_mjcf(self.folder / Path(self.card["files"]["scene"]).name)
        spec.option.timestep = 1.0 / self.card["physics_hz"]
        self.model = model = spec.compile()
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET.value  # a diverged robot has fallen
        self._substeps = round(self.card["physics_hz"] / self.control_hz)
        if not (MIN_HZ <= self.control_hz <= MAX_HZ and 1 <= self._substeps <= MAX_SUBSTEPS):
            raise ValueError(f"{self.control_hz:g} control steps per second, of {self._substeps} physics steps")
        free = np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE)
        if not len(free):
            raise ConfigError("the robot has no free base")
        self.root, self._v = int(model.jnt_qposadr[free[0]]), int(model.jnt_dofadr[free[0]])
        self._free = [int(model.jnt_dofadr[joint]) for joint in free]
        self.base = int(model.jnt_bodyid[free[0]])
        robot = [body for body in range(model.nbody) if model.body_rootid[body] == model.body_rootid[self.base]]
        named = [body for name in TORSO for body in robot if name in model.body(body).name.rpartition("/")[2].lower()]
        self.torso = (*named, self.base)[0]

    def _read_actuators(self) -> None:
        card = self.card
        self.joints = {joint["name"]: joint for joint in card["joints"]}
        self.qpos_of, self.qvel_of = np.array([[row["qpos"], row["qvel"]] for row in card["joints"]], int).T
        self.pose = np.array([joint.get("pose", joint["default"]) for joint in card["joints"]], float)
        columns = {name: column for column, (name, _) in enumerate(control_names(self.model))}  # of data.ctrl
        if unknown := [row["name"] for row in card["actuators"] if row["name"] not in columns]:
            raise ConfigError(f"the scene has no actuator {unknown[0]!r}")
        self.columns = np.array([columns[row["name"]] for row in card["actuators"]], int)
        self._start = np.concatenate([card["start"]["qpos"], card["start"]["qvel"]]).astype(float)
        if "control" not in card:
            raise ConfigError("no controls in the card: only the task can apply actions")
        offset = np.array(card["control"]["offset"], float)
        held = [self.joints.get(row.get("joint")) if row.get("kp") else None for row in card["actuators"]]
        hold = [zero if row is None else self._start[row["qpos"]] for row, zero in zip(held, offset, strict=True)]
        self._baselines = {"zero": offset, "hold": np.array(hold, float)}
        self.holds_at_zero = np.allclose(*self._baselines.values(), atol=1e-3)  # both baselines are the same

    def _allocate(self) -> None:
        num, size, states = self.num, self.card["action"]["size"], self.card["recurrent_state"]
        self._batch = Batch(self.model, num, nthread=min(available_cpus(), num))
        self.state, self.qpos, self.qvel = self._batch.state, self._batch.bind("qpos"), self._batch.bind("qvel")
        self._ctrl, self._xfrc = self._batch.bind("ctrl"), self._batch.bind("xfrc_applied")
        self._sensors = self._batch.bind("sensordata")
        self.command = np.zeros((num, len(self.commands)))  # in the card's order
        self.force = np.zeros((num, 3))  # on the torso: forward, left, up [N]
        self.force_until = np.full(num, np.inf)  # control step of the episode at which the force ends
        self.delay = np.zeros(num, int)  # of the controls [control steps], at most MAX_DELAY
        self.noise = np.zeros(num)  # standard deviation of observation noise, relative to each value
        self.down = np.tile([0.0, 0.0, -1.0], (num, 1))  # direction of gravity; see `slope`
        self.action = np.zeros((num, size), np.float32)
        self.targets = np.zeros((num, len(self.columns)))  # controls in the card's order, not delayed
        self.steps = np.zeros(num, int)  # control steps since the episode's start
        self._stage = _VEL  # accelerometers need more
        self._varied: dict[str, np.ndarray] = {}
        self._reweighed = np.zeros(num, bool)
        self._queue = np.zeros((num, 1 + MAX_DELAY, len(self.columns)))  # latest controls, newest first
        self.terms = self.card["observation"].get("terms", [])
        self._frames = [np.zeros((num, term["history"], term["size"]), np.float32) for term in self.terms]
        shapes = [[num if n == "batch" else n for n in state["shape"]] for state in states]
        self._states = {s["input"]: np.zeros(shape, s["dtype"]) for s, shape in zip(states, shapes, strict=True)}
        by_row = [np.moveaxis(self._states[s["input"]], s["shape"].index("batch"), 0) for s in states]
        self._policy_state = [self.action, self.steps, self._queue, *self._frames, *by_row]

    def _check(self) -> None:
        """Raise unless all observation terms are known and the network fits the card."""
        row = np.zeros(1, int)
        pairs = zip(self.terms, self._readers, strict=True)
        wrong = [term["name"] for term, read in pairs if read is None or np.shape(read(row)) != (1, term["size"])]
        if wrong or not self.terms or self.card["observation"].get("images"):
            raise ConfigError(f"only the task can compute {', '.join(wrong) or 'its observations'}")
        self._act(row)
        if not np.isfinite(self.action[0]).all():
            raise ValueError("the network's output is not finite")

    def _reader(self, source: list[str]) -> Read | None:
        """Return the reader of an observation source, or None if only the task can compute it."""
        joints, base = self.joints, slice(self._v, self._v + 3)
        match source:
            case ["sensor", name]:
                sensor = self.model.sensor(name)
                columns = slice(int(sensor.adr[0]), int(sensor.adr[0] + sensor.dim[0]))
                self._stage = max(self._stage, int(self.model.sensor_needstage[sensor.id]))
                return lambda rows: self._sensors[rows, columns]
            case ["joint", "positions"]:
                return lambda rows: self.qpos[rows[:, None], self.qpos_of]
            case ["joint", "positions", "from", "the", "pose"]:
                return lambda rows: self.qpos[rows[:, None], self.qpos_of] - self.pose
            case ["joint", "velocities"]:
                return lambda rows: self.qvel[rows[:, None], self.qvel_of]
            case ["velocity", "of", joint] if joint in joints:
                return lambda rows: self.qvel[rows, joints[joint]["qvel"], None]
            case ["position" | "sine" | "cosine" as what, "of", joint] if joint in joints:
                function = {"position": np.asarray, "sine": np.sin, "cosine": np.cos}[what]
                return lambda rows: function(self.qpos[rows, joints[joint]["qpos"], None])
            case ["gravity"]:
                return lambda rows: self._in_base(rows, self.down[rows])
            case ["base", "velocity"]:
                return lambda rows: self._in_base(rows, self.qvel[rows, base])
            case ["base", "angular", "velocity"]:
                return lambda rows: self.qvel[rows, self._v + 3 : self._v + 6]  # MuJoCo stores it in the body frame
            case ["last", "action"]:
                return lambda rows: self.action[rows]
            case ["command", *names] if {*names} <= {*self.commands}:
                columns = [self.commands.index(name) for name in names]
                return lambda rows: self.command[rows[:, None], columns]
            case ["phase", "sine" | "cosine" as wave, period, offset, *rest] if len(rest) in (0, 2):
                turn, shift, fixed = math.tau / float(period), float(offset), [float(value) for value in rest[1:]]
                return lambda rows: self._wave(rows, getattr(np, wave[:3]), turn, shift, fixed)
        return None

    def _wave(self, rows: np.ndarray, wave: Callable, turn: float, shift: float, fixed: list[float]) -> np.ndarray:
        """Return the gait's clock; with `fixed`, its value while the command is zero."""
        values = wave(turn * self.steps[rows] * self.dt + shift)
        still = np.linalg.norm(self.command[rows], axis=1) < STILL
        return (np.where(still, fixed[0], values) if fixed else values)[:, None]

    def vary(self, field: str) -> np.ndarray:
        """Return a model field's values per robot, such as `geom_friction`, for writing until `restore`."""
        return self._varied.setdefault(field, self._batch.expand(field))

    def restore(self) -> None:
        """Remove all disturbances: the model's own fields, no force, delay or noise."""
        for field, values in self._varied.items():
            values[:] = getattr(self.model.opt, field[4:]) if field.startswith("opt.") else getattr(self.model, field)
        if self._reweighed.any():
            self._batch.set_const(np.flatnonzero(self._reweighed))
            self._reweighed[:] = False
        self.force[:], self.force_until[:], self.delay[:], self.noise[:] = 0.0, np.inf, 0, 0.0
        self.down[:] = 0.0, 0.0, -1.0

    def slope(self, rows: np.ndarray, angle: np.ndarray, downhill: np.ndarray) -> None:
        """Tilt gravity by an angle [rad], [robots], towards a direction of the heading frame, [robots, 3]."""
        flat = self._from_heading(rows, downhill)
        self.down[rows] = np.sin(angle)[:, None] * flat - np.cos(angle)[:, None] * [0.0, 0.0, 1.0]
        self.vary("opt.gravity")[rows] = np.linalg.norm(self.model.opt.gravity) * self.down[rows]

    def reset(self, rows: np.ndarray | None = None) -> None:
        """Start an episode of the given robots: the card's start, without last action, history and controls."""
        rows = np.arange(self.num) if rows is None else rows
        self._batch.reset(rows)
        self.qpos[rows], self.qvel[rows] = np.split(self._start, [self.model.nq])
        self.force[rows] = 0.0
        for array in self._policy_state:
            array[rows] = 0
        self.refresh(rows)

    def refresh(self, rows: np.ndarray | None = None, constants: bool = False) -> None:
        """Compute sensors after writes to the state, and with `constants` the model's fields that depend on masses."""
        if constants:
            self._batch.set_const(rows)
            self._reweighed[slice(None) if rows is None else rows] = True
        self._batch.forward(rows, stage=self._stage)

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy state and policy state, but no disturbances, from one robot to another each."""
        for array in (self.state, self.command, self.targets, *self._policy_state):
            array[target] = array[source]
        self.refresh(target)

    def push(self, rows: np.ndarray, velocity: np.ndarray) -> None:
        """Add to the velocity of the base: forward, left, up [m/s], [robots, 3]."""
        self.qvel[rows, self._v : self._v + 3] += self._from_heading(rows, velocity)
        self.refresh(rows)

    def step(self, active: np.ndarray | None = None) -> None:
        """Take one control step of the robots in a mask, or of all."""
        rows = np.arange(self.num) if active is None else np.flatnonzero(active)
        if not len(rows):
            return
        if self.policy == "file":
            self._act(rows)
        else:
            self.targets[rows] = self._baselines[self.policy]
        queue = np.where((self.steps[rows] == 0)[:, None, None], self.targets[rows, None], self._queue[rows])
        self._queue[rows] = np.concatenate([self.targets[rows, None], queue[:, :-1]], axis=1)
        self._ctrl[rows[:, None], self.columns] = self._queue[rows, self.delay[rows]]
        self.force[self.steps >= self.force_until] = 0.0
        self._xfrc[rows, self.torso, :3] = self._from_heading(rows, self.force[rows])
        self._batch.step(rows, nstep=self._substeps, stage=_VEL)
        if limit := self.card.get("max_angular_velocity"):  # not part of a MuJoCo model
            for first in self._free:
                speed = np.linalg.norm(self.qvel[rows, first + 3 : first + 6], axis=1, keepdims=True)
                self.qvel[rows, first + 3 : first + 6] *= np.minimum(1.0, limit / np.maximum(speed, 1e-9))
            self.refresh(rows)
        self.steps[rows] += 1

    def _act(self, rows: np.ndarray) -> None:
        """Observe, run the network and set targets of the given robots."""
        for term, read, frames in zip(self.terms, self._readers, self._frames, strict=True):
            assert read is not None
            value = read(rows)
            if self.noise.any():
                drawn = self._noise.standard_normal((self.num, term["size"]))[rows]
                value = value * (1.0 + self.noise[rows, None] * drawn)
            frame = value.astype(np.float32) * np.float32(term["scale"])
            older = np.where((self.steps[rows] == 0)[:, None, None], frame[:, None], frames[rows, 1:])
            frames[rows] = np.concatenate([older, frame[:, None]], axis=1)
        obs = np.concatenate([frames[rows].reshape(len(rows), -1) for frames in self._frames], axis=1)
        inputs: dict[str, np.ndarray] = {"obs": obs}
        axes = [state["shape"].index("batch") for state in self.card["recurrent_state"]]
        for (name, value), axis in zip(self._states.items(), axes, strict=True):
            inputs[name] = np.take(value, rows, axis)
        action, control, *states = self._run(inputs)
        for value, axis, new in zip(self._states.values(), axes, states, strict=True):
            np.moveaxis(value, axis, 0)[rows] = np.moveaxis(new, axis, 0)
        self.action[rows], self.targets[rows] = action, control

    def _quaternion(self, rows: np.ndarray) -> np.ndarray:
        return self.qpos[rows, self.root + 3 : self.root + 7].T

    def _in_base(self, rows: np.ndarray, vector: np.ndarray) -> np.ndarray:
        """Rotate vectors [robots, 3] from the world frame to the base frame."""
        w, axis = self._quaternion(rows)[0][:, None], -self._quaternion(rows)[1:].T
        turned = 2.0 * np.cross(axis, vector)
        return vector + w * turned + np.cross(axis, turned)

    def _yaw(self, rows: np.ndarray) -> np.ndarray:
        w, x, y, z = self._quaternion(rows)
        return np.arctan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))

    def _from_heading(self, rows: np.ndarray, vector: np.ndarray, sign: float = 1.0) -> np.ndarray:
        """Rotate vectors [robots, 3] from the heading frame (forward, left, up) to the world frame, or back."""
        cos, sin = np.cos(self._yaw(rows)), sign * np.sin(self._yaw(rows))
        x, y, z = vector.T
        return np.column_stack([cos * x - sin * y, sin * x + cos * y, z])

    @property
    def height(self) -> np.ndarray:
        """Height of the base [m], shape [num]."""
        return self.qpos[:, self.root + 2]

    @property
    def up(self) -> np.ndarray:
        """Vertical part of the base's up axis, shape [num]."""
        _, x, y, _ = self._quaternion(np.arange(self.num))
        return 1.0 - 2.0 * (x * x + y * y)

    @property
    def velocity(self) -> np.ndarray:
        """Velocity in the heading frame, x, y [m/s] and yaw [rad/s], shape [num, 3]."""
        rows, (w, x, y, z) = np.arange(self.num), self._quaternion(np.arange(self.num))
        linear = self._from_heading(rows, self.qvel[:, self._v : self._v + 3], -1.0)
        spin = self.qvel[:, self._v + 3 : self._v + 6].T
        yaw = 2 * (x * z - w * y) * spin[0] + 2 * (y * z + w * x) * spin[1] + (1 - 2 * (x * x + y * y)) * spin[2]
        return np.column_stack([linear[:, :2], yaw])

    def fallen(self, standing: float) -> np.ndarray:
        """Return a mask of robots below FALLEN of the standing height [m], tilted by over 60 degrees, or diverged."""
        with np.errstate(invalid="ignore"):
            return ~((self.height >= FALLEN * standing) & (self.up >= TILTED))
