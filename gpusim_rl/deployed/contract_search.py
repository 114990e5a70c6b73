"""Check of an adopted policy in simulation, and search over likely errors of its contract."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gpusim_rl.deployed.adopt import Body, write_folder
from gpusim_rl.deployed.contract import PER_JOINT, PHASES, Contract, Inputs, Phase
from gpusim_rl.deployed.network_file import load
from gpusim_rl.deployed.walkers import Walkers

ROWS = 96  # robots simulated at once
STAND_S, SETTLE_S, MOVE_S = 5.0, 1.0, 3.0  # standing, standing before the other commands, and moving [s]
COMMANDS = (0.5, 0.0, 0.0), (0.0, 0.5, 0.0), (0.4, 0.0, 0.6)  # [m/s, m/s, rad/s]
FOLLOWS = 0.3, 1.8  # velocity along the command, relative to it
YAW = 2.0  # initial heading [rad]: the world's frame must differ from the robot's
FINALISTS = 32  # contracts that are tested with all commands
PER_CHANGE = 1.1  # factor by which a change must make the targets smoother
BEAM, DEPTH, REPORTED = 8, 3, 3  # contracts that are changed further, most changes, and contracts listed
SCALES: dict[str, tuple[Any, ...]] = {  # usual scales of terms; others are 1
    "base_lin_vel": (1.0, 2.0),
    "base_ang_vel": (1.0, 0.25),
    "velocity_commands": (1.0, 2.0, (2.0, 2.0, 0.25)),
    "command_lin_vel": (1.0, 2.0),
    "command_ang_vel": (1.0, 0.25),
    "joint_vel": (1.0, 0.05, 0.1),
}
_BASE = "base_lin_vel", "base_ang_vel", "projected_gravity"
_MOVE = "velocity_commands", "command_lin_vel", "command_ang_vel"
_JOINTS = "joint_pos", "joint_pos_rel", "joint_vel", "last_action"
ORDERS = {  # usual orders of terms
    "Isaac Lab": (*_BASE, *_MOVE, *_JOINTS, *PHASES),
    "mjlab": (*_BASE, *_JOINTS, *_MOVE, *PHASES),
    "Booster": (*_BASE[::-1], *_MOVE, "cos_phase", "sin_phase", "gait_phase", *_JOINTS),
    "the alphabet": (*sorted((*_BASE, *_MOVE, *_JOINTS, *PHASES)),),
    "holosoma": (  # its names in alphabetical order
        *("last_action", "base_ang_vel", "base_lin_vel", "command_ang_vel", "command_lin_vel", "velocity_commands"),
        *("cos_phase", "joint_pos", "joint_pos_rel", "joint_vel", "gait_phase", "projected_gravity", "sin_phase"),
    ),
}
READINGS = (
    ("base_ang_vel", "base_ang_vel_world", "base_ang_vel frame"),
    ("base_lin_vel", "base_lin_vel_world", "base_lin_vel frame"),
    ("base_quat_wxyz", "base_quat_xyzw", "quaternion order"),
    ("joint_pos_rel", "joint_pos", "default pose"),
)


@dataclass(frozen=True)
class Change:
    """Correction of a likely error: the part of the contract, the correction in words, and the new values."""

    part: str
    text: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """Contract with what it does in simulation; `velocity` has a row for each of `COMMANDS` that was tested."""

    contract: Contract
    changes: tuple[Change, ...] = ()
    upright: float = 0.0  # [s], at most STAND_S + MOVE_S
    velocity: tuple[tuple[float, ...], ...] = ()
    roughness: float = math.inf  # mean squared rate of the targets [rad^2/s^2]

    @property
    def stands(self) -> bool:
        """True if the robot stayed upright."""
        return self.upright > STAND_S + MOVE_S - 0.1

    @property
    def moves(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Velocity and command of each test."""
        return [(np.array(moved), np.array(wanted)) for moved, wanted in zip(self.velocity, COMMANDS, strict=False)]

    @property
    def follows(self) -> list[bool]:
        """True for each command that the robot followed, and for a policy without commands."""
        shares = [float(moved @ wanted / (wanted @ wanted)) for moved, wanted in self.moves]
        return [FOLLOWS[0] <= share <= FOLLOWS[1] or not self.contract.commands for share in shares]

    @property
    def believed(self) -> bool:
        """True if the robot stood, and moved in the commanded direction."""
        return self.stands and self.follows[0]

    @property
    def rank(self) -> tuple[float, int, float]:
        """Sorting key, best first: seconds upright, number of commands followed, smoothness and velocity error."""
        errors = [np.linalg.norm(moved - wanted) / np.linalg.norm(wanted) for moved, wanted in self.moves]
        rough = self.roughness * float(1.0 + np.mean(errors or [0.0])) * PER_CHANGE ** len(self.changes)
        return -round(self.upright, 1), -sum(self.follows), rough

    @property
    def text(self) -> str:
        """Corrections in words."""
        return "; ".join(change.text for change in self.changes) or "as given"

    def describe(self) -> str:
        """Return what the candidate does, in words."""
        texts = [f"{moved.round(2).tolist()} of {wanted.tolist()}" for moved, wanted in self.moves]
        moves = f", moves {'; '.join(texts)}" if self.stands and self.contract.commands else ""
        return f"upright {self.upright:.1f} of {STAND_S + MOVE_S:g} s{moves}, roughness {self.roughness:.2g}"


def _simulate(walkers: Walkers, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give command `i` after standing; return seconds upright, mean velocity at the end, and roughness per robot."""
    walkers.reset()
    num, hz, standing = walkers.num, walkers.control_hz, walkers.height.copy()
    active, upright, change, velocity = np.ones(num, bool), np.zeros(num), np.zeros(num), np.zeros((num, 3))
    stand, measured = round((SETTLE_S if i else STAND_S) * hz), round(MOVE_S / 2 * hz)
    total = stand + 2 * measured
    for step in range(total):
        walkers.command[:] = COMMANDS[i][: walkers.command.shape[1]] if step >= stand else 0.0
        before = walkers.targets.copy()
        walkers.step(active)
        change += (step > 0) * active * np.square((walkers.targets - before) * hz).mean(axis=1)
        active &= ~walkers.fallen(standing)
        upright += active / hz
        velocity[active] += (step >= total - measured) * walkers.velocity[active] / measured
        if not active.any():
            break
    return upright, velocity, change / np.maximum(upright * hz, 1.0)


class Trials(Walkers):
    """Robots driven by one network, with a contract each."""

    def __init__(self, network: onnx.ModelProto, contracts: Sequence[Contract], body: Body) -> None:
        inputs = Inputs(contracts, body.joints)
        self._columns = np.array([inputs.place(contract) for contract in contracts])
        self._servos = np.array([body.servos(contract) for contract in contracts])
        self._limit = np.array([[contract.action_clip or np.inf] for contract in contracts])
        self._contracts, self._body, self._network = contracts, body, load(network)
        with tempfile.TemporaryDirectory() as name:
            write_folder(folder := Path(name) / "trials", network, contracts[0], body, "trials", inputs)
            super().__init__(folder, len(contracts))
        gain, bias = self.vary("actuator_gainprm"), self.vary("actuator_biasprm")
        gain[..., 0], bias[..., 1], bias[..., 2] = self._servos["kp"], -self._servos["kp"], -self._servos["kd"]

    def reset(self, rows: np.ndarray | None = None) -> None:
        """Start all episodes, in the pose of each contract."""
        super().reset(rows)
        starts = {contract.pose: contract for contract in self._contracts}
        poses = {pose: self._body.start(self.model, contract) for pose, contract in starts.items()}
        self.qpos[:] = [poses[contract.pose] for contract in self._contracts]
        self.qpos[:, self.root + 3 : self.root + 7] = math.cos(YAW / 2), 0.0, 0.0, math.sin(YAW / 2)
        self.refresh()

    def _act(self, rows: np.ndarray) -> None:
        columns, servos, limit = self._columns[rows], self._servos[rows], self._limit[rows]

        def run(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
            seen = np.take_along_axis(inputs["obs"], columns["index"], axis=1) - columns["bias"]
            seen = np.clip(seen, columns["low"], columns["high"]) * columns["scale"]
            action = np.clip(self._network(seen.astype(np.float32)), -limit, limit)
            targets = servos["offset"] + servos["scale"] * np.take_along_axis(action, servos["source"], axis=1)
            return [action, np.clip(targets, servos["low"], servos["high"])]

        self._run = run
        super()._act(rows)


class ContractSearch:
    """Search for the contract with which a policy stands, follows commands, and is smooth."""

    def __init__(self, network: onnx.ModelProto, body: Body) -> None:
        self.network, self.body, self.simulated = network, body, 0

    def correct(self, found: list[Candidate]) -> list[Candidate]:
        """Add corrections to evaluated candidates, one at a time, until one is believed; return all, best first."""
        best = found
        for depth in range(DEPTH):
            if depth and best[0].believed:
                break
            new = {repr(candidate.contract): candidate for candidate in best}
            for old in found[:BEAM]:
                parts = {change.part for change in old.changes}
                for change in (change for change in corrections(old.contract, self.body) if change.part not in parts):
                    contract = replace(old.contract, **change.values)
                    new.setdefault(repr(contract), Candidate(contract, (*old.changes, change)))
            found = self.evaluate([*new.values()][len(best) :])
            best = sorted([*best, *found], key=lambda candidate: candidate.rank)
        return best

    def evaluate(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Test candidates, the best ones with all commands; return them best first."""
        ranked = sorted(self._test(candidates, 0), key=lambda candidate: candidate.rank)
        finalists = [candidate for candidate in ranked[:FINALISTS] if candidate.stands]
        rest = ranked[len(finalists) :]
        for i in range(1, len(COMMANDS)):
            finalists = self._test(finalists, i)
        return sorted([*finalists, *rest], key=lambda candidate: candidate.rank)

    def _test(self, candidates: Sequence[Candidate], i: int) -> list[Candidate]:
        """Return the candidates with the results of command `i`."""
        results = list[Candidate]()
        for hz in sorted({candidate.contract.control_hz for candidate in candidates}):
            members = [candidate for candidate in candidates if candidate.contract.control_hz == hz]
            for part in (members[first : first + ROWS] for first in range(0, len(members), ROWS)):
                trials = Trials(self.network, [candidate.contract for candidate in part], self.body)
                self.simulated += len(part)
                for old, upright, velocity, rough in zip(part, *_simulate(trials, i), strict=True):
                    new: dict[str, Any] = {} if i else {"upright": float(upright), "roughness": float(rough)}
                    results.append(replace(old, velocity=(*old.velocity, tuple(velocity.tolist())), **new))
        return results


def corrections(base: Contract, body: Body) -> Iterator[Change]:
    """Yield corrections of likely errors."""
    terms, kinds, n = base.terms, [term.kind for term in base.terms], len(base.joints)
    index = [body.joints.index(joint) for joint in base.joints]
    pose, kp, kd, effort = (tuple(values[i] for i in index) for values in (body.pose, body.kp, body.kd, body.effort))
    for name, order in body.orders.items():
        joints = tuple(joint for joint in order if joint in base.joints)
        yield Change("joint order", f"joints {name}", {"joints": joints})
        places = [base.joints.index(joint) for joint in joints]
        lists = {key: getattr(base, key) for key in PER_JOINT}
        values = {key: items and tuple(items[i] for i in places) for key, items in lists.items()}
        yield Change("joint order", f"joints and their values {name}", {"joints": joints, **values})
    for name, order in ORDERS.items():
        usual = tuple(sorted(terms, key=lambda term: (*order, term.kind).index(term.kind)))
        yield Change("term order", f"terms as in {name}", {"terms": usual})
    for a, b in itertools.combinations(range(len(terms)), 2):
        exchanged = [*terms]
        exchanged[a], exchanged[b] = terms[b], terms[a]
        yield Change("term order", f"{kinds[a]} and {kinds[b]} exchanged", {"terms": tuple(exchanged)})
    for i, term in enumerate(terms):
        sign = tuple(-s for s in term.scale) if isinstance(term.scale, tuple) else -term.scale
        rows: list[tuple[str, str, dict[str, Any]]] = [(f"{term.kind} sign", f"{term.kind} negated", {"scale": sign})]
        rows += [(f"{term.kind} scale", f"{term.kind} scale {s}", {"scale": s}) for s in SCALES.get(term.kind, (1.0,))]
        for pair, part in ((pair, part) for *pair, part in READINGS if term.kind in pair):
            other = pair[pair.index(term.kind) - 1]
            rows.append((part, f"{other} in place of {term.kind}", {"kind": other}))
        for part, text, values in rows:
            yield Change(part, text, {"terms": (*terms[:i], replace(term, **values), *terms[i + 1 :])})
    for name, angles in (("the robot's own", pose), ("zero", (0.0,) * n)):
        yield Change("default pose", f"pose {name}", {"pose": angles, "action_offset": angles})
        yield Change("default pose", f"pose {name}, except for action 0", {"pose": angles})
        yield Change("default pose", f"pose of action 0 {name}", {"action_offset": angles})
    yield Change("default pose", "pose of action 0 that of the observation", {"action_offset": base.pose})
    share = tuple(0.25 * torque / max(stiffness, 1e-9) for torque, stiffness in zip(effort, base.kp, strict=True))
    for name, scale in (*((str(s), (s,) * n) for s in (0.25, 0.5, 1.0)), ("0.25 effort / kp of each joint", share)):
        if max(scale) < 1e3:
            yield Change("action scale", f"action scale {name}", {"action_scale": scale})
    yield Change("gains", "kp and kd of the robot", {"kp": kp, "kd": kd})
    yield from (Change("control rate", f"control rate {hz:g} Hz", {"control_hz": hz}) for hz in (50.0, 100.0, 200.0))
    histories = {term.history for term in terms}
    if max(histories) > 1:
        yield Change("history", "history in the other direction", {"newest_first": not base.newest_first})
    if min(histories) > 1 and len(histories) == 1:
        other = "frames" if base.layout == "terms" else "terms"
        yield Change("history", f"history by {other}", {"layout": other})
    if {*kinds} & {*PHASES}:
        clocks: list[dict[str, Any]] = [{"period": period} for period in (1.0, 0.8, 0.6, 0.5)]
        clocks += [{"standing": angle} for angle in (None, 0.0, math.pi)]
        clocks += [{"offsets": (0.0, math.pi)}] * (len(base.phase.offsets) == 2)
        yield from (Change("phase", f"phase {clock}", {"phase": replace(base.phase, **clock)}) for clock in clocks)


def guesses(known: dict[str, Any], inputs: int, body: Body) -> list[Candidate]:
    """Return candidates for a network that lists `known_values`, but no observations; empty if no usual list fits."""
    n, found = len(known["joints"]), list[Candidate]()
    usual = (*_BASE[1:], *_JOINTS[1:], *_MOVE[1:])
    for base, feet in itertools.product((0, 3), (0, 1, 2)):
        history, rest = divmod(inputs, 9 + 3 * n + base + 2 * feet)
        if rest or not history:
            continue
        kinds = (*usual, *["base_lin_vel"] * (base > 0), *["sin_phase", "cos_phase"] * (feet > 0))
        phase = Phase(offsets=(0.0, math.pi)[: max(feet, 1)], standing=math.pi if feet > 1 else None)
        options = itertools.product(ORDERS, SCALES["base_ang_vel"], SCALES["joint_vel"], (0.25, 0.5, 1.0))
        for order, turn, speed, scale in options:
            scales = {"base_ang_vel": turn, "joint_vel": speed}
            rows = [
                {"kind": k, "scale": scales.get(k, 1.0), "history": history}
                for k in sorted(kinds, key=ORDERS[order].index)
            ]
            contract = Contract.read({**known, "terms": rows, "action_scale": scale}, "guess", body.joints)
            text = f"terms as in {order}, base_ang_vel scale {turn}, joint_vel scale {speed}, action scale {scale}"
            found.append(Candidate(replace(contract, phase=phase), (Change("guess", text, {}),)))
    return found
