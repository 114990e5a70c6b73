"""Batch of robots in plain MuJoCo, driven by an exported policy, with disturbances per robot."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import mujoco
import numpy as np
from mujoco.batch import Batch

from gpusim_rl.errors import ConfigError, UserError
from gpusim_rl.export import CARD
from gpusim_rl.export.policy import load_network
from gpusim_rl.files.safe_open import load_json, refuse_links
from gpusim_rl.machine.hardware import available_cpus
from gpusim_rl.sim.actuators import control_names
from gpusim_rl.sim.robot_xml import bounded_memory, read_mjcf

TORSO = ("torso", "trunk", "pelvis", "base")  # part of the name of the body that forces and payloads act on
FALLEN = 0.6  # height of the base, relative to standing, below which a robot has fallen
TILTED = 0.5  # z of the base's up axis below which a robot has fallen: 60 degrees
MAX_SPEED = 1e5  # [m/s, rad/s], above which a robot has diverged
STILL = 1e-3  # norm of a command that counts as zero
MAX_DELAY_S, MAX_DELAY = 0.2, 3  # longest delay: the longer of a time and a number of control steps
MIN_HZ, MAX_HZ, MAX_SUBSTEPS = 10.0, 2000.0, 1000  # control rate [Hz]; physics steps in a control step
WORLD_SENSORS = ("FRAME", "SUBTREE", "MAGNETOMETER", "GEOMNORMAL", "GEOMFROMTO")  # types that measure in its frame

Read = Callable[[np.ndarray], np.ndarray]  # values of the robots with the given indices, [robots, size]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors from a damaged export inside the block into a one-line ConfigError."""
    try:
        yield
    except Exception as error:  # onnxruntime's and MuJoCo's classes have no common base
        text = " ".join(str(error).split())[:500] or type(error).__name__
        if isinstance(error, UserError):
            raise ConfigError(text, key=str(path)) from None
        problem = f"no entry {text}" if isinstance(error, KeyError) else text
        raise ConfigError(f"damaged export: {problem}", key=str(path), hint="Try gpusim-rl export") from None


class Walkers:
    """Batch of robots driven by one exported policy; bit-identical for any number of threads.

    Arrays have a row per robot. Callers write to the state, `command` and the disturbances, and `step`. Nothing in the
    export folder is executed. The seed is that of the observation noise.

    Raises:
        ConfigError: The folder is no export, is damaged, or its robot has no free base.
    """

    def __init__(self, folder: Path, num: int, seed: int = 0) -> None:
        self.folder, self.num = folder, num
        self.policy: Literal["file", "zero", "hold"] = "file"  # or a baseline: action 0, or the start pose as target
        if not (folder / CARD).is_file():
            raise ConfigError(f"no {CARD} in this folder", key=str(folder), hint="Try gpusim-rl export")
        with reading(folder), bounded_memory():
            refuse_links(folder)
            self.card = load_json(folder / CARD)
            self.control_hz, self.dt = float(self.card["control_hz"]), 1.0 / float(self.card["control_hz"])
            self.ranges, self.commands = self.card["commands"], [*self.card["commands"]]  # trained ranges; names
            for name, ends in self.ranges.items():
                if ends is not None and (np.shape(ends) != (2,) or not -math.inf < ends[0] <= ends[1] < math.inf):
                    raise ConfigError("damaged card", key=f"commands.{name}", expected="a range", got=ends)
            self._run = load_network(folder, self.card["files"], providers=["CPUExecutionProvider"])
            self._read_scene()
            self._read_actuators()
            self._allocate(seed)
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
        base = np.bincount(model.body_rootid[model.dof_bodyid], minlength=1).argmax()  # objects have fewer joints
        if base not in model.jnt_bodyid[free]:
            raise ConfigError("the robot has no free base")
        self.root, first = int(model.jnt_qposadr[model.body_jntadr[base]]), int(model.body_dofadr[base])
        self.linear, self.angular = slice(first, first + 3), slice(first + 3, first + 6)  # columns of qvel
        self._spins = model.jnt_dofadr[free][:, None] + np.arange(3, 6)
        robot = np.flatnonzero(model.body_rootid == base)
        named = [body for name in TORSO for body in robot if name in model.body(body).name.rpartition("/")[2].lower()]
        self.base, self.torso = int(base), int((*named, base)[0])

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
        self._most_spin = float(card.get("max_angular_velocity") or math.inf)  # not part of a MuJoCo model
        if "control" not in card:
            raise ConfigError("no controls in the card: only the task can apply actions")
        offset = np.array(card["control"]["offset"], float)
        angles = dict(zip(self.joints, self._start[: self.model.nq][self.qpos_of], strict=False))
        servos = [row.get("joint") if row.get("kp") else None for row in card["actuators"]]
        hold = [angles.get(joint, zero) for joint, zero in zip(servos, offset, strict=True)]
        self._baselines = {"zero": offset, "hold": np.array(hold, float)}
        self.holds_at_zero = np.allclose(*self._baselines.values(), atol=1e-3)  # both baselines are the same

    def _allocate(self, seed: int) -> None:
        num, size, delays = self.num, self.card["action"]["size"], max(MAX_DELAY, round(MAX_DELAY_S * self.control_hz))
        self._batch = Batch(self.model, num, nthread=min(available_cpus(), num))
        self.state, self.qpos, self.qvel = self._batch.state, self._batch.bind("qpos"), self._batch.bind("qvel")
        self._ctrl, self._xfrc = self._batch.bind("ctrl"), self._batch.bind("xfrc_applied")
        self._varied, self._stale = dict[str, np.ndarray](), False
        self.command = np.zeros((num, len(self.commands)))  # in the card's order
        self.force = np.zeros((num, 3))  # on the torso: forward, left, up [N]
        self.force_until = np.full(num, np.inf)  # end of the force [control steps of the episode]
        self.delay = np.zeros(num, int)  # of the controls [control steps], at most `max_delay`
        self.noise = np.zeros(num)  # standard deviation of observation noise, relative to each value
        self.down = np.tile([0.0, 0.0, -1.0], (num, 1))  # direction of gravity that policies observe
        self.action = np.zeros((num, size), np.float32)
        self.targets = np.zeros((num, len(self.columns)))  # controls in the card's order, not delayed
        self.steps = np.zeros(num, int)  # control steps since the episode's start
        self.max_delay, self._sent = delays, np.zeros((num, 1 + delays, len(self.columns)))  # targets, by step: a ring
        self._noise, self._stage = np.random.default_rng(seed), mujoco.mjtStage.mjSTAGE_VEL.value
        self.terms, self.world_terms = self.card["observation"].get("terms", []), list[str]()
        self._readers = [self._reader(term["source"], term["name"]) for term in self.terms]
        self._frames = [np.zeros((num, term["history"], term["size"]), np.float32) for term in self.terms]
        states = {row["input"]: (row["shape"], row["dtype"]) for row in self.card["recurrent_state"]}
        self._hidden = {
            name: np.zeros((num, layers, units), kind) for name, ((layers, _, units), kind) in states.items()
        }
        self._episode = [self.action, self.steps, self._sent, *self._frames, *self._hidden.values()]
        self._saved = [self.state, self.command, self.targets, *self._episode]

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

    def _reader(self, source: str, term: str) -> Read | None:
        """Return the reader of an observation source, or None if only the task can compute it."""
        joints, words = self.joints, source.split()
        match words:
            case ["sensor", name]:
                sensor, values = self.model.sensor(name), self._batch.sensor(name).data
                self._stage = max(self._stage, int(self.model.sensor_needstage[sensor.id]))
                kind = mujoco.mjtSensor(int(sensor.type[0])).name.removeprefix("mjSENS_")
                self.world_terms += [term] * (sensor.refid[0] < 0 and kind.startswith(WORLD_SENSORS))
                return lambda rows: values[rows]
            case ["position" | "velocity" | "sine" | "cosine" as what, "of", joint] if joint in joints:
                array, key = (self.qvel, "qvel") if what == "velocity" else (self.qpos, "qpos")
                function = {"sine": np.sin, "cosine": np.cos}.get(what, np.asarray)
                return lambda rows: function(array[rows, joints[joint][key], None])
            case ["command", *names] if {*names} <= {*self.commands}:
                columns = [self.commands.index(name) for name in names]
                return lambda rows: self.command[rows[:, None], columns]
            case ["phase", "sine" | "cosine" as wave, period, offset, *rest] if len(rest) in (0, 2):
                turn, shift = math.tau / float(period), float(offset)
                fixed, still = (float(rest[1]), STILL) if rest else (0.0, -1.0)  # value while the command is zero

                def phase(rows: np.ndarray) -> np.ndarray:
                    values = getattr(np, wave[:3])(turn * self.steps[rows] * self.dt + shift)
                    return np.where(np.linalg.norm(self.command[rows], axis=1) < still, fixed, values)[:, None]

                return phase
        others: dict[str, Read] = {
            "joint positions": lambda rows: self.qpos[rows[:, None], self.qpos_of],
            "joint positions from the pose": lambda rows: self.qpos[rows[:, None], self.qpos_of] - self.pose,
            "joint velocities": lambda rows: self.qvel[rows[:, None], self.qvel_of],
            "gravity": lambda rows: self._in_base(rows, self.down[rows]),
            "base velocity": lambda rows: self._in_base(rows, self.qvel[rows, self.linear]),
            "base angular velocity": lambda rows: self.qvel[rows, self.angular],  # MuJoCo has it in the body frame
            "last action": lambda rows: self.action[rows],
        }
        return others.get(" ".join(words))

    def vary(self, field: str) -> np.ndarray:
        """Return a model field's values per robot, such as `geom_friction`, for writing until `restore`."""
        self._stale |= field.startswith("body_")
        return self._varied.setdefault(field, self._batch.expand(field))

    def restore(self) -> None:
        """Remove all disturbances: the model's own fields, no force, delay or noise."""
        for field, values in self._varied.items():
            own = getattr(self.model.opt, field[4:]) if field.startswith("opt.") else getattr(self.model, field)
            if (values != own).any():
                self.vary(field)[:] = own
        self.force[:], self.force_until[:], self.delay[:], self.noise[:] = 0.0, np.inf, 0, 0.0
        self.down[:] = 0.0, 0.0, -1.0

    def reset(self, rows: np.ndarray | None = None) -> None:
        """Start an episode of the given robots: the card's start, without last action, history and controls."""
        rows = np.arange(self.num) if rows is None else rows
        self._batch.reset(rows, stage=mujoco.mjtStage.mjSTAGE_NONE.value)
        self.qpos[rows], self.qvel[rows] = np.split(self._start, [self.model.nq])
        for array in self._episode:
            array[rows] = 0

    def refresh(self, rows: np.ndarray | None = None) -> None:
        """Compute the sensors of the given robots, as before each action."""
        self._batch.forward(rows, stage=self._stage)

    def save(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return a copy of state, command and policy state of the given robots, without disturbances."""
        return [array[rows] for array in self._saved]

    def load(self, rows: np.ndarray, saved: list[np.ndarray]) -> None:
        """Set the given robots to what `save` returned."""
        for array, values in zip(self._saved, saved, strict=True):
            array[rows] = values

    def step(self, active: np.ndarray | None = None) -> None:
        """Take one control step of the robots in a mask, or of all."""
        rows = np.arange(self.num) if active is None else np.flatnonzero(active)
        if not len(rows):
            return
        if self._stale:  # fields that depend on masses
            self._batch.set_const()
            self._stale = False
        if self.policy == "file":
            self._act(rows)
        else:
            self.targets[rows] = self._baselines[self.policy]
        now, ring = self.steps[rows], self._sent.shape[1]
        self._sent[rows, now % ring] = self.targets[rows]
        late = np.minimum(self.delay[rows], now)  # the first targets last until later ones arrive
        self._ctrl[rows[:, None], self.columns] = self._sent[rows, (now - late) % ring]
        share = np.clip(self.force_until[rows] - now, 0.0, 1.0)  # of this control step
        self._xfrc[rows, self.torso, :3] = self.from_heading(rows, share[:, None] * self.force[rows])
        self._batch.step(rows, nstep=self._substeps)
        if self._most_spin < math.inf:
            spin = self.qvel[rows[:, None, None], self._spins]
            speed = np.maximum(np.linalg.norm(spin, axis=2, keepdims=True), 1e-9)
            self.qvel[rows[:, None, None], self._spins] = spin * np.minimum(1.0, self._most_spin / speed)
        self.steps[rows] += 1

    def _act(self, rows: np.ndarray) -> None:
        """Observe, run the network and set targets of the given robots."""
        self.refresh(rows)
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
        hidden = {name: values[rows].swapaxes(0, 1) for name, values in self._hidden.items()}
        self.action[rows], self.targets[rows], *states = self._run({"obs": obs, **hidden})
        for values, new in zip(self._hidden.values(), states, strict=True):
            values[rows] = new.swapaxes(0, 1)

    def _quaternion(self, rows: np.ndarray | slice) -> np.ndarray:
        return self.qpos[rows, self.root + 3 : self.root + 7].T

    def _in_base(self, rows: np.ndarray, vector: np.ndarray) -> np.ndarray:
        """Rotate vectors [robots, 3] from the world frame to the base frame."""
        w, axis = self._quaternion(rows)[0][:, None], -self._quaternion(rows)[1:].T
        turned = 2.0 * np.cross(axis, vector)
        return vector + w * turned + np.cross(axis, turned)

    def from_heading(self, rows: np.ndarray | slice, vector: np.ndarray, sign: float = 1.0) -> np.ndarray:
        """Rotate vectors [robots, 3] or [3] from the heading frame (forward, left, up) to the world frame, or back."""
        w, x, y, z = self._quaternion(rows)
        yaw = np.arctan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))
        cos, sin = np.cos(yaw), sign * np.sin(yaw)
        x, y, z = np.broadcast_to(vector, (len(yaw), 3)).T
        return np.column_stack([cos * x - sin * y, sin * x + cos * y, z])

    @property
    def height(self) -> np.ndarray:
        """Height of the base [m], shape [num]."""
        return self.qpos[:, self.root + 2]

    @property
    def velocity(self) -> np.ndarray:
        """Velocity in the heading frame, x, y [m/s] and yaw [rad/s], shape [num, 3]."""
        (w, x, y, z), spin = self._quaternion(slice(None)), self.qvel[:, self.angular].T
        yaw = 2 * (x * z - w * y) * spin[0] + 2 * (y * z + w * x) * spin[1] + (1 - 2 * (x * x + y * y)) * spin[2]
        return np.column_stack([self.from_heading(slice(None), self.qvel[:, self.linear], -1.0)[:, :2], yaw])

    def fallen(self, standing: float) -> np.ndarray:
        """Return a mask of robots below FALLEN of the standing height [m], tilted by over 60 degrees, or diverged."""
        sound = (np.abs(self.qvel) < MAX_SPEED).all(axis=1) & np.isfinite(self.targets).all(axis=1)
        _, x, y, _ = self._quaternion(slice(None))
        with np.errstate(invalid="ignore", over="ignore"):
            up = 1.0 - 2.0 * (x * x + y * y)
        return ~(sound & (self.height >= FALLEN * standing) & (up >= TILTED))
