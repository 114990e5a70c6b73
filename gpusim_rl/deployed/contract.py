"""Contract of a policy: how observations, actions and joints map to a robot."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from gpusim_rl.errors import ConfigError, did_you_mean
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import Limits, Positive, Rule

SENSORS = {  # sensors that a term adds to the scene, by name: kind in MuJoCo's XML
    "ang_vel_world": "frameangvel",
    "lin_vel_world": "framelinvel",
    "orientation": "framequat",
}
_COMMAND = "command x y yaw"
_VECTORS = {  # source and its columns
    "base_lin_vel": ("base velocity", (0, 1, 2)),
    "base_lin_vel_world": ("sensor robot/lin_vel_world", (0, 1, 2)),
    "base_ang_vel": ("base angular velocity", (0, 1, 2)),
    "base_ang_vel_world": ("sensor robot/ang_vel_world", (0, 1, 2)),
    "base_quat_wxyz": ("sensor robot/orientation", (0, 1, 2, 3)),
    "base_quat_xyzw": ("sensor robot/orientation", (1, 2, 3, 0)),
    "projected_gravity": ("gravity", (0, 1, 2)),
    "velocity_commands": (_COMMAND, (0, 1, 2)),
    "command_lin_vel": (_COMMAND, (0, 1)),
    "command_ang_vel": (_COMMAND, (2,)),
}
_JOINTS = {"joint_pos": "joint positions", "joint_pos_rel": "joint positions", "joint_vel": "joint velocities"}
PHASES = {"sin_phase": ("sine",), "cos_phase": ("cosine",), "gait_phase": ("sine", "cosine")}
KINDS = (*_VECTORS, *_JOINTS, "last_action", *PHASES)
UNITS = {
    **dict.fromkeys(["base velocity", "sensor robot/lin_vel_world"], "m/s"),
    **dict.fromkeys(["base angular velocity", "sensor robot/ang_vel_world", "joint velocities"], "rad/s"),
    **{"joint positions": "rad", _COMMAND: "m/s, m/s, rad/s"},
}
UNMEASURED = {"base velocity", "sensor robot/lin_vel_world"}  # sources for which robots have no sensor
PER_JOINT = "pose", "kp", "kd", "action_scale", "action_offset", "target_clip"  # fields of `Contract`
FEW = Rule("at most 200 items", lambda items: 0 < len(items) <= 200)
if TYPE_CHECKING:
    PerJoint = tuple[float, ...]
else:
    PerJoint = float | tuple[float, ...]  # Contract repeats one number for all joints

COLUMN = np.dtype([("index", int), *((name, np.float32) for name in ("bias", "scale", "low", "high"))])
"""Column of the network's input: scale * (reading - bias), with the difference clipped before it is scaled."""


@dataclass(frozen=True)
class Term:
    """Observation term."""

    kind: Literal[KINDS]  # pyright: ignore[reportInvalidTypeForm]
    scale: float | tuple[float, ...] = 1.0
    clip: Limits | None = None  # before scaling
    history: Annotated[int, Rule("1 to 200 frames", lambda frames: 1 <= frames <= 200)] = 1

    def __post_init__(self) -> None:
        if isinstance(self.scale, tuple) and len(set(self.scale)) == 1:
            object.__setattr__(self, "scale", self.scale[0])


@dataclass(frozen=True)
class Phase:
    """Clock of the gait, one offset per foot."""

    period: Positive = 1.0  # [s]
    offsets: Annotated[tuple[float, ...], FEW] = (0.0, math.pi)  # [rad]
    standing: float | None = None  # phase while the command is zero [rad]; None: the clock keeps running

    def source(self, wave: str, offset: float) -> str:
        """Return the card's source of the sine or cosine."""
        value = None if self.standing is None else round(getattr(math, wave[:3])(self.standing), 9) + 0.0
        return f"phase {wave} {self.period!r} {offset!r}{'' if value is None else f' standing {value:g}'}"


@dataclass(frozen=True)
class Contract:
    """Interface between policy and robot; joints and actions are in the policy's order.

    Joints that `joints` leaves out hold the robot's own pose.

    Raises:
        ConfigError: The values do not fit together.
    """

    joints: Annotated[tuple[str, ...], FEW]
    pose: PerJoint  # [rad]
    kp: PerJoint  # servo stiffness [N m/rad]
    kd: PerJoint  # servo damping [N m s/rad]
    terms: Annotated[tuple[Term, ...], FEW]
    action_scale: PerJoint
    action_offset: PerJoint = ()  # joint target at action 0 [rad]; empty: `pose`
    action_clip: Positive | None = None
    target_clip: tuple[Limits, ...] | None = None  # of each joint's target [rad]
    control_hz: Annotated[float, Rule("10 to 1000 Hz", lambda hz: 10.0 <= hz <= 1000.0)] = 50.0
    commands: dict[Literal["x", "y", "yaw"], Limits | None] = field(default_factory=dict)  # m/s, rad/s
    phase: Phase = Phase()
    layout: Literal["terms", "frames"] = "terms"  # order of a history: term by term, or frame by frame
    newest_first: bool = False

    def __post_init__(self) -> None:
        n, offset = len(self.joints), self.pose if self.action_offset == () else self.action_offset
        object.__setattr__(self, "action_offset", offset)
        for name in PER_JOINT:
            values = getattr(self, name)
            values = (values,) * n if isinstance(values, float) else values
            if values is not None and len(values) != n:
                raise ConfigError(key=name, expected=f"one number, or {n} for the joints", got=f"{len(values)} values")
            object.__setattr__(self, name, values)
        for term in self.terms:
            size = self.size_of(term.kind)
            if isinstance(term.scale, tuple) and len(term.scale) != size:
                expected = f"one number, or {size}"
                raise ConfigError(key=f"terms: {term.kind}: scale", expected=expected, got=f"{len(term.scale)} values")
        if self.layout == "frames" and len({term.history for term in self.terms}) > 1:
            raise ConfigError("terms need the same history", key="layout=frames")
        if min(*self.kp, *self.kd) < 0.0:
            raise ConfigError("kp and kd must not be negative")
        kinds = {term.kind for term in self.terms}
        named = ("x", "y", "yaw") if kinds & {"velocity_commands", "command_lin_vel", "command_ang_vel"} else ()
        object.__setattr__(self, "commands", {name: self.commands.get(name) for name in named})

    @classmethod
    def read(cls, given: Any, where: str, scene: Sequence[str]) -> Contract:
        """Build a contract from plain values, read from `where`; joints may be named without prefix and `_joint`."""
        try:
            terms = given.get("terms") if isinstance(given, dict) else None
            for i, row in enumerate(terms if isinstance(terms, list) else ()):  # errors name the row
                build(Term, row, f"terms.{i}")
            contract = build(cls, given, "contract")
            return replace(contract, joints=match_joints(contract.joints, scene))
        except ConfigError as error:
            raise error.within(where) from None

    def to_mapping(self) -> dict[str, Any]:
        """Return plain values for `read`."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # tuples become lists

    def columns(self, scene: Sequence[str]) -> list[tuple[tuple[str, int, int], int, tuple[float, ...]]]:
        """Return what each of the network's inputs reads from a robot with joints `scene`, in the scene's order.

        An input has a source of the card, its width and an element; its age [control steps]; bias, scale, low and high.
        """
        step = 1 if self.newest_first else -1
        rows = [(term, age) for term in self.terms for age in range(term.history)[::step]]
        if self.layout == "frames":
            rows.sort(key=lambda row: step * row[1])
        return [
            (place, age, (bias, scale, *(term.clip or (-math.inf, math.inf))))
            for term, age in rows
            for place, bias, scale in self._frame(term, scene)
        ]

    def _frame(self, term: Term, scene: Sequence[str]) -> Iterable[tuple[tuple[str, int, int], float, float]]:
        """Return source, its width, element, bias and scale of each number in a frame of the term."""
        kind, n = term.kind, len(self.joints)
        if kind in _VECTORS:
            source, elements = _VECTORS[kind]
            places = [(source, 4 if "quat" in kind else 3, element) for element in elements]
        elif kind in _JOINTS:
            places = [(_JOINTS[kind], len(scene), scene.index(joint)) for joint in self.joints]
        elif kind == "last_action":
            places = [("last action", n, i) for i in range(n)]
        else:
            places = [(self.phase.source(wave, o), 1, 0) for o in self.phase.offsets for wave in PHASES[kind]]
        bias = self.pose if kind == "joint_pos_rel" else (0.0,) * len(places)
        scale = term.scale if isinstance(term.scale, tuple) else (term.scale,) * len(places)
        return zip(places, bias, scale, strict=True)

    def size_of(self, kind: str) -> int:
        """Return the number of elements in a frame of a term."""
        return len([*self._frame(Term(kind), self.joints)])

    @property
    def size(self) -> int:
        """Number of the network's inputs."""
        return len(self.columns(self.joints))


def match_joints(names: Sequence[str], scene: Sequence[str]) -> tuple[str, ...]:
    """Return the scene's joints with these names; ConfigError names one that the robot lacks."""
    plain, asked = ({_plain(joint): joint for joint in joints} for joints in (scene, names))
    for name in asked.keys() - plain.keys():
        hint = f"{did_you_mean(name, plain)} The robot has {', '.join(plain)}"
        raise ConfigError(f"the robot has no joint {asked[name]!r}", key="joints", hint=hint)
    if len(asked) < len(names):
        raise ConfigError("a joint is listed twice", key="joints")
    return tuple(plain[name] for name in asked)


def _plain(joint: str) -> str:
    return joint.rpartition("/")[2].removesuffix("_joint").lower()


class Inputs:
    """Readings that some contracts need, each with its newest frames, oldest first, as in an export's card."""

    def __init__(self, contracts: Sequence[Contract], scene: Sequence[str]) -> None:
        self._scene, self.sources = scene, dict[str, tuple[int, int]]()  # width and number of frames
        for (source, width, _), age, _ in itertools.chain.from_iterable(c.columns(scene) for c in contracts):
            self.sources[source] = width, max(self.sources.get(source, (0, 0))[1], age + 1)
        ends = itertools.accumulate(width * history for width, history in self.sources.values())
        self._end = dict(zip(self.sources, ends, strict=True))
        self.size = max(self._end.values())  # number of readings

    def place(self, contract: Contract) -> np.ndarray:
        """Return a `COLUMN` of each input of the contract's network, with indices into the readings."""
        columns = contract.columns(self._scene)
        rows = [(self._end[source] - (age + 1) * width + i, *values) for (source, width, i), age, values in columns]
        return np.array(rows, COLUMN)

    def terms(self) -> list[dict[str, Any]]:
        """Return the card's observation terms: unscaled readings, which the network orders and scales."""
        rows = []
        for i, (source, (width, history)) in enumerate(self.sources.items()):
            name = f"phase_{i}" if source.startswith("phase") else source.rpartition("/")[2].replace(" ", "_")
            row = {"name": "command" if source == _COMMAND else name, "size": width, "unit": UNITS.get(source, "-")}
            row |= {"scale": 1.0, "history": history, "source": source, "measured": source not in UNMEASURED}
            rows.append(row)
        return rows
