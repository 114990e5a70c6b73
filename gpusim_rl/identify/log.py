"""Logs of a robot's joints: npz, csv, PACE, ROS 2 bags, and Unitree's messages in them. A log is data."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim_rl.errors import ConfigError, available, first_line, import_extra, warn
from gpusim_rl.export.joint_order import ORDERS
from gpusim_rl.files import npz_file
from gpusim_rl.files.safe_open import read_bytes

Array = NDArray[Any]

LOG_BYTES = 512 << 20  # size of a log, packed and unpacked; an hour of 29 joints at 500 Hz takes 1.7 GB, 6 s take 3 MB
LEAST_HZ, MOST_HZ = 50.0, 5000.0
JITTER, GAP = 0.5, 1.5  # of the sample time: smallest distance of samples; largest, above which the log has a gap
LEAST_S = 1.0  # of a piece between gaps [s]
MOST_S = 40.0  # used of a log [s]
TURN = 6.4  # joint angle that may be one in degrees [rad]
SLOPES = (0.7, 1.4)  # plausible ratio of `dq` to the slope of `q`
BASE_RATE = 0.05  # of a base at rest [rad/s]
CLIPPED, NEAR = 0.02, 0.98  # share of samples at the effort limit; share of the limit that counts as at it
NAMES = ("time", "target", "q", "dq", "tau", "kp", "kd", "gyro", "joint_names")
ALIASES = {"dof_pos": "q", "dof_vel": "dq", "des_dof_pos": "target", "dof_torque": "tau"}  # of PACE


@dataclass(frozen=True)
class Log:
    """Samples of all joints at the same times: readings, and targets as they were sent."""

    path: str
    joints: list[str]
    time: Array  # [s]
    target: Array  # [samples, joints], rad
    q: Array
    dq: Array | None = None
    tau: Array | None = None  # N m
    kp: Array | None = None  # stiffness of each servo as commanded [N m/rad]; None: unknown
    kd: Array | None = None  # damping [N m s/rad]
    gyro: Array | None = None  # of the base, [samples, 3], rad/s

    @property
    def period(self) -> float:
        """Sample time [s]."""
        return float(np.median(np.diff(self.time)))

    @cached_property
    def pieces(self) -> list[slice]:
        """Parts between gaps that are long enough."""
        cuts = np.flatnonzero(np.diff(self.time) > GAP * self.period) + 1
        edges = [0, *cuts.tolist(), len(self.time)]
        return [slice(a, b) for a, b in itertools.pairwise(edges) if self.time[b - 1] - self.time[a] >= LEAST_S]

    def noise(self, values: Array, least: float) -> Array:
        """Return the standard deviation of white noise in each column, from third differences."""
        third = [np.diff(values[piece], 3, axis=0) for piece in self.pieces]
        return np.maximum(np.sqrt(np.mean(np.concatenate(third) ** 2, axis=0) / 20.0), least)

    def state_at(self, piece: slice, seconds: float) -> tuple[Array, Array]:
        """Return readings and velocities at the start of a piece, from lines through its first samples."""
        time = self.time[piece] - self.time[piece][0]
        rows = slice(0, max(5, int((time <= seconds).sum())))
        line = np.polynomial.polynomial.polyfit(time[rows], self.q[piece][rows], 1)
        if self.dq is None:
            return line[0], line[1]
        return line[0], self.dq[piece][rows].mean(axis=0)

    def held_targets(self, piece: slice, dt: float, steps: int, delay: float, at: Array | None = None) -> Array:
        """Return the mean over each physics step of the targets sent, which are held between samples, after a delay.

        The mean is linear in the delay between whole steps; at whole steps it is that of a simulator's own delay.
        """
        time, target = self.time[piece], self.target[piece]
        nodes = np.concatenate([[time[0] - 10.0], time, [time[-1] + 10.0]])
        held = np.concatenate([target[:1], target, target[-1:]])[:-1]
        integral = np.concatenate([np.zeros((1, held.shape[1])), np.cumsum(held * np.diff(nodes)[:, None], axis=0)])
        edges = time[0] + dt * np.arange(steps + 1) if at is None else np.append(at, at[-1] + dt)
        sums = np.stack([np.interp(edges - delay, nodes, column) for column in integral.T], axis=1)
        return np.diff(sums, axis=0) / np.diff(edges)[:, None]


def read_log(path: Path, joints: Sequence[str] | None = None) -> Log:
    """Read and check a log; `joints` names its columns if the file does not.

    Raises:
        ConfigError: The file is damaged, lacks arrays, or its samples are unusable; the message says where.
    """
    if not path.exists():
        raise ConfigError("no such file", key=str(path))
    readers = {".npz": _npz, ".csv": _csv, ".pt": _torch, ".mcap": _bag, ".db3": _bag, "": _bag}
    if path.suffix not in readers:
        raise ConfigError("unknown kind of log", key=str(path), expected=", ".join(filter(None, readers)))
    try:
        arrays = readers["" if path.is_dir() else path.suffix](path)
    except ConfigError:
        raise
    except Exception as error:  # damaged files fail in a dozen ways
        raise ConfigError(f"damaged log: {first_line(error)}", key=str(path)) from None
    return checked(path, {ALIASES.get(name, name): value for name, value in arrays.items()}, joints)


def _npz(path: Path) -> dict[str, Any]:
    return npz_file.load(path, LOG_BYTES, (*NAMES, *ALIASES))[0]


def _csv(path: Path) -> dict[str, Any]:
    text = io.StringIO(read_bytes(path, LOG_BYTES).decode("utf-8-sig"))
    header = [name.strip() for name in next(csv.reader(text), [])]
    if "time" not in header:
        expected = "columns time,target/<joint>,q/<joint>,dq/<joint>"
        raise ConfigError(key=str(path), expected=expected, got=",".join(header)[:80])
    table = np.loadtxt(text, delimiter=",", ndmin=2)
    joints = [name.removeprefix("q/") for name in header if name.startswith("q/")]
    arrays: dict[str, Any] = {"time": table[:, header.index("time")], "joint_names": joints}
    for kind in ("target", "q", "dq", "tau", "kp", "kd"):
        columns = [header.index(f"{kind}/{joint}") for joint in joints if f"{kind}/{joint}" in header]
        if columns and len(columns) < len(joints):
            raise ConfigError(f"{kind} of {len(columns)} of {len(joints)} joints", key=str(path))
        if columns:
            arrays[kind] = table[:, columns]
    return arrays


def _torch(path: Path) -> dict[str, Any]:
    import torch

    try:
        content = torch.load(io.BytesIO(read_bytes(path, LOG_BYTES)), map_location="cpu", weights_only=True)
    except Exception:
        problem = "not a file of tensors only: reading it could run code"
        raise ConfigError(problem, key=str(path), expected="PACE's time, dof_pos, des_dof_pos") from None
    if not isinstance(content, dict):
        raise ConfigError(key=str(path), expected="a dict of tensors", got=type(content).__name__)
    return {name: value.numpy() for name, value in content.items() if isinstance(value, torch.Tensor)}


def _motors(command: bool, family: str) -> np.dtype:
    """Return the layout of Unitree's LowCmd or LowState: plain structs, aligned as in CDR."""
    hg, words = family == "hg", {"hg": 35, "go": 20}[family]
    floats = ("q", "dq", "tau", "kp", "kd") if command else ("q", "dq", "ddq", "tau_est")
    motor: list[Any] = [("mode", "u1"), *((name, "f4") for name in floats)]
    if command:
        motor += [("reserve", "u4", () if hg else 3)]
    elif hg:
        motor += [("temperature", "i2", 2), ("vol", "f4"), ("sensor", "u4", 2), ("state", "u4"), ("reserve", "u4", 4)]
    else:
        motor += [("raw", "f4", 3), ("temperature", "i1"), ("lost", "u4"), ("reserve", "u4", 2)]
    motors = [("motors", np.dtype(motor, align=True), words)]
    go_head = [("head", "u1", 4), ("sn", "u4", 2), ("version", "u4", 2), ("bandwidth", "u2")]
    imu = [("quaternion", "f4", 4), ("gyroscope", "f4", 3), ("accelerometer", "f4", 3), ("rpy", "f4", 3)]
    imu = [("imu", np.dtype([*imu, ("temperature", "i2" if hg else "i1")], align=True))]
    tail: list[Any] = [("reserve", "u4", 4), ("crc", "u4")]
    if command and hg:
        head: list[Any] = [("mode_pr", "u1"), ("mode_machine", "u1")]
    elif command:
        head, tail = (
            go_head,
            [("bms", "u1", 4), ("remote", "u1", 40), ("led", "u1", 15), ("reserve", "u4"), ("crc", "u4")],
        )
    elif hg:
        head = [("version", "u4", 2), ("mode", "u1", 2), ("tick", "u4"), *imu]
        tail = [("remote", "u1", 40), *tail]
    else:
        head = [*go_head, *imu]
        bms = np.dtype(
            [("head", "u1", 4), ("current", "i4"), ("cycle", "u2"), ("ntc", "i1", 4), ("cells", "u2", 15)], align=True
        )
        tail = [("bms", bms), ("foot_force", "i2", 8), ("tick", "u4"), ("remote", "u1", 40), ("bit_flag", "u1")]
        tail += [
            ("adc", "f4"),
            ("ntc", "i1", 2),
            ("power", "f4", 2),
            ("fan", "u2", 4),
            ("reserve", "u4"),
            ("crc", "u4"),
        ]
    return np.dtype([*head, *motors, *tail], align=True)


UNITREE = {  # by message name, without the middle: layout
    f"unitree_{family}/LowCmd" if command else f"unitree_{family}/LowState": _motors(command, family)
    for family, command in itertools.product(("hg", "go"), (True, False))
}


def _bag(path: Path) -> dict[str, Any]:
    """Read a ROS 2 bag (sqlite3 or MCAP): Unitree's messages, or JointState with JointTrajectory."""
    rosbag2 = import_extra("rosbags.rosbag2", "logs", "a ROS 2 bag")
    typesys = import_extra("rosbags.typesys", "logs", "a ROS 2 bag")
    store = typesys.get_typestore(typesys.Stores.ROS2_JAZZY)
    states, commands = list[tuple[float, Any]](), list[tuple[float, Any]]()
    size = 0
    with rosbag2.Reader(path) as reader:  # definitions of messages in the bag are not used
        for connection, stamp, raw in reader.messages():
            kind = connection.msgtype.replace("/msg/", "/").replace("/dds_/", "/").rstrip("_")
            size += len(raw)
            if size > LOG_BYTES:
                raise ConfigError("log too large", key=str(path), expected=f"at most {LOG_BYTES} bytes")
            if kind in UNITREE:
                layout = UNITREE[kind]
                row: Any = np.frombuffer(raw, layout, 1, 4)[0]  # after the encapsulation header
            elif kind in ("sensor_msgs/JointState", "trajectory_msgs/JointTrajectory"):
                row = store.deserialize_cdr(raw, connection.msgtype)
            else:
                continue
            command = kind.endswith(("LowCmd", "JointTrajectory")) or "command" in connection.topic
            (commands if command else states).append((1e-9 * stamp, row))
    if not states or not commands:
        expected = "LowState and LowCmd, or JointState and JointTrajectory"
        raise ConfigError("no joint states" if not states else "no commands", key=str(path), expected=expected)
    arrays = _unitree(states, commands) if isinstance(states[0][1], np.void) else _ros(states, commands)
    sent = arrays.pop("sent")  # commands at the times of the states: the last one before
    last = np.searchsorted(sent, arrays.pop("stamps"), side="right") - 1
    first = int((last < 0).sum())
    arrays |= {name: arrays[name][last[first:]] for name in ("target", "kp", "kd") if name in arrays}
    return arrays | {name: arrays[name][first:] for name in ("time", "q", "dq", "tau", "gyro") if name in arrays}


def _unitree(states: list[tuple[float, Any]], commands: list[tuple[float, Any]]) -> dict[str, Any]:
    state, order = np.array([row for _, row in states]), np.array([row for _, row in commands])
    used = np.flatnonzero(order["motors"]["kp"].any(axis=0))
    names = next((names for names in ORDERS["unitree"] if len(names) == (used[-1] + 1 if len(used) else 0)), None)
    if names is None:
        raise ConfigError(f"{len(used)} motors with a stiffness", expected="12 of a Go1, Go2 or B2, or 29 of a G1")
    state_of, sent = state["motors"][:, : len(names)], order["motors"][:, : len(names)]
    stiffness = np.where(sent["kp"] > 0.0, sent["kp"], 1.0)
    return {
        "joint_names": list(names),
        "time": 1e-3 * state["tick"].astype(float),  # of the robot's clock
        "stamps": np.array([stamp for stamp, _ in states]),
        "sent": np.array([stamp for stamp, _ in commands]),
        "target": sent["q"] + (sent["tau"] + sent["kd"] * sent["dq"]) / stiffness,  # the same effort, from one number
        "kp": sent["kp"],
        "kd": sent["kd"],
        "q": state_of["q"],
        "dq": state_of["dq"],
        "tau": state_of["tau_est"],
        "gyro": state["imu"]["gyroscope"],
    }


def _ros(states: list[tuple[float, Any]], commands: list[tuple[float, Any]]) -> dict[str, Any]:
    joints = [str(name) for name in states[0][1].name]

    def table(rows: Sequence[tuple[Any, Any]], what: str) -> Array:
        orders = [[list(names).index(joint) for joint in joints] for names, _ in rows]
        return np.array([np.asarray(values, float)[order] for order, (_, values) in zip(orders, rows, strict=True)])

    try:
        points = [
            (row.joint_names, row.points[0].positions) if hasattr(row, "points") else (row.name, row.position)
            for _, row in commands
        ]
        arrays = {"target": table(points, "target")}
        for name, field in (("q", "position"), ("dq", "velocity"), ("tau", "effort")):
            if len(getattr(states[0][1], field)):
                arrays[name] = table([(row.name, getattr(row, field)) for _, row in states], name)
    except (ValueError, IndexError) as error:
        raise ConfigError(
            f"a message lacks a joint or value: {first_line(error)}", expected=", ".join(joints)
        ) from None
    stamps = np.array([row.header.stamp.sec + 1e-9 * row.header.stamp.nanosec for _, row in states])
    received = np.array([stamp for stamp, _ in states])
    own = stamps if stamps.any() else received
    sent = np.array([stamp for stamp, _ in commands])
    return {**arrays, "joint_names": joints, "time": own, "stamps": received, "sent": sent}


def checked(path: Path, arrays: Mapping[str, Any], joints: Sequence[str] | None = None) -> Log:
    """Return the log of arrays by name; raise ConfigError where samples are unusable."""

    def fail(problem: str, name: str, **fields: Any) -> ConfigError:
        return ConfigError(problem, key=f"{path}: {name}", **fields)

    for name in ("time", "target", "q"):
        if arrays.get(name) is None:
            raise fail("no such array", name, expected="time, target, q, and optionally dq, tau, kp, kd")
    names = [str(name) for name in (arrays.get("joint_names", ()) if joints is None else joints)]
    tables: dict[str, Array] = {}
    for name in NAMES[:-1]:
        if (value := arrays.get(name)) is not None:
            try:
                tables[name] = np.asarray(value, np.float64)
            except (TypeError, ValueError):
                raise fail("not an array of numbers", name) from None
    time, count = tables["time"].ravel(), len(tables["q"])
    if not names:
        raise fail("no names of joints", "joint_names", hint="Try --joints A,B,... in the order of the log's columns")
    if len({*names}) < len(names):
        raise fail("a joint occurs twice", "joint_names", got=", ".join(names)[:200])
    for name, table in tables.items():
        wanted = {"time": (count,), "gyro": (count, 3)}.get(name, (count, len(names)))
        if name in ("kp", "kd") and table.ndim == 1 and len(table) == len(names):
            table = tables[name] = np.tile(table, (count, 1))
        if (time if name == "time" else table).shape != wanted:
            raise fail("wrong shape", name, expected=str(list(wanted)), got=list(table.shape))
        if len(bad := np.argwhere(~np.isfinite(table.reshape(count, -1)))):
            of = f" of {names[bad[0][1]]}" if table.ndim == 2 and name != "gyro" else ""
            raise fail(f"not a finite number{of} in row {bad[0][0]}", name)
        if name in ("kp", "kd"):
            if np.ptp(table, axis=0).any():
                joint = names[int(np.ptp(table, axis=0).argmax())]
                raise fail(f"the gain of {joint} changes", name, expected="constant gains", hint="Try cutting the log")
            if (table[0] < 0.0).any() or (name == "kp" and not table[0].all()):
                joint = names[int(table[0].argmin())]
                raise fail(f"wrong gain of {joint}", name, expected="a positive number", got=float(table[0].min()))
            tables[name] = table[0]
    log = Log(str(path), names, time, tables["target"], tables["q"])
    log = replace(log, **{name: tables[name] for name in ("dq", "tau", "kp", "kd", "gyro") if name in tables})
    _check_times(log, fail)
    _check_units(log, fail)
    return log


def _check_times(log: Log, fail: Any) -> None:
    if len(log.time) < 10 or not (np.diff(log.time) > 0.0).all():
        row = int((np.diff(log.time) <= 0.0).argmax()) + 1 if len(log.time) > 1 else 0
        raise fail(f"does not increase in row {row}", "time", expected="at least 10 increasing times [s]")
    hz = 1.0 / log.period
    if not LEAST_HZ <= hz <= MOST_HZ:
        expected = f"{LEAST_HZ:g} to {MOST_HZ:g} samples per second, and times in seconds"
        raise fail("wrong sample rate", "time", expected=expected, got=round(hz, 3))
    step = np.diff(log.time) / log.period
    if (jitter := float((step < JITTER).mean())) > 0.002:
        problem = f"{jitter:.1%} of samples come sooner than half a sample after the last"
        raise fail(problem, "time", expected="times of measurement, not of arrival")
    if not log.pieces:
        gaps = int((step > GAP).sum())
        raise fail(f"{gaps} gaps leave no piece of {LEAST_S:g} s", "time", got=f"{log.time[-1] - log.time[0]:.3g} s")
    if gaps := int((step > GAP).sum()):
        seconds = sum(log.time[p.stop - 1] - log.time[p.start] for p in log.pieces)
        warn(f"{log.path}: {gaps} gaps; using {len(log.pieces)} pieces, {seconds:.3g} s")


def _check_units(log: Log, fail: Any) -> None:
    for name in ("q", "target"):
        if (most := float(np.abs(getattr(log, name)).max(axis=0).max())) > TURN:
            joint = log.joints[int(np.abs(getattr(log, name)).max(axis=0).argmax())]
            raise fail(f"{joint} reaches {most:.4g}: degrees?", name, expected="rad", hint="Try np.deg2rad")
    if log.gyro is not None and (rate := float(np.sqrt(np.mean(log.gyro**2, axis=0)).max())) > BASE_RATE:
        problem = f"the base turns at {rate:.2g} rad/s (rms)"
        raise fail(problem, "gyro", expected=f"at most {BASE_RATE:g}", hint="Try fixing the base")
    if log.dq is None:
        return
    reach = max(1, round(0.01 / log.period))
    for i, joint in enumerate(log.joints):
        pairs = []
        for piece in log.pieces:
            time, q, dq = log.time[piece], log.q[piece, i], log.dq[piece, i]
            slope = (q[2 * reach :] - q[: -2 * reach]) / (time[2 * reach :] - time[: -2 * reach])
            pairs.append(np.stack([slope, dq[reach:-reach]]))
        slope, dq = np.concatenate(pairs, axis=1)
        likeness = float(np.corrcoef(slope, dq)[0, 1]) if slope.std() > 0.0 and dq.std() > 0.0 else 0.0
        ratio = float(dq.std() / max(slope.std(), 1e-9))
        if abs(likeness) > 0.9 and (likeness < 0.0 or not SLOPES[0] < ratio < SLOPES[1]):
            problem = f"dq of {joint} is {np.sign(likeness) * ratio:.3g} times the slope of q"
            raise fail(problem, "dq", expected="rad/s, and q in rad, time in s")


def matched(log: Log, joints: Sequence[str], limits: Array | None = None) -> Log:
    """Return a log with the columns of a robot's joints, in its order; names may lack `_joint` and prefixes.

    Raises:
        ConfigError: The log and the robot have other joints, or an angle is far outside of the joint's range.
    """

    def short(name: str) -> str:
        return name.rpartition("/")[2].lower().removesuffix("_joint")

    own = {short(name): i for i, name in enumerate(log.joints)}
    if missing := [joint for joint in joints if short(joint) not in own]:
        hint = available(missing[0], log.joints)
        raise ConfigError(f"the log has no joint {missing[0]!r}", key=log.path, hint=hint)
    if unknown := [name for name in log.joints if short(name) not in map(short, joints)]:
        raise ConfigError(f"the robot has no joint {unknown[0]!r}", key=log.path, hint=available(unknown[0], joints))
    order = [own[short(joint)] for joint in joints]
    tables = {
        name: table[..., order]
        for name in ("target", "q", "dq", "tau", "kp", "kd")
        if (table := getattr(log, name)) is not None
    }
    log = replace(log, joints=list(joints), **tables)
    if limits is not None:
        middle, beyond = np.median(log.q, axis=0), 0.2
        wrong = (middle < limits[:, 0] - beyond) | (middle > limits[:, 1] + beyond)
        if wrong.any():
            i = int(wrong.argmax())
            problem, hint = f"{joints[i]} is outside of its range", "Try the order of --joints, signs, zeros and units"
            raise ConfigError(
                problem,
                key=log.path,
                expected=f"{np.round(limits[i], 3)} rad",
                got=round(float(middle[i]), 3),
                hint=hint,
            )
    return log
