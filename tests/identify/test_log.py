"""Logs of robots in the formats that they write, and logs that cannot be used."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.export.joint_order import ORDERS
from gpusim_rl.identify import log as logs
from gpusim_rl.identify.log import UNITREE, Log, matched, read_log
from helpers.raised import message

HZ, ROWS = 200.0, 600
RANGE = np.array([[-2.0, 2.0], [-2.0, 2.0]])


def arrays(**changes):
    time = np.arange(ROWS) / HZ
    q = np.stack([0.5 * np.sin(3.0 * time), 0.4 * np.cos(4.0 * time)], axis=1)
    dq = np.stack([1.5 * np.cos(3.0 * time), -1.6 * np.sin(4.0 * time)], axis=1)
    return {"time": time, "target": q + 0.01, "q": q, "dq": dq, "joint_names": ["hip", "knee"], **changes}


def save(folder, **changes):
    content = {name: value for name, value in arrays(**changes).items() if value is not None}
    np.savez(folder / "log.npz", **content)
    return folder / "log.npz"


def without(rows):
    return {name: np.delete(arrays()[name], np.ravel(rows), axis=0) for name in ("time", "target", "q", "dq")}


def late(rng):
    time = arrays()["time"].copy()
    time[1:-1] += rng.uniform(-0.45, 0.45, ROWS - 2) / HZ
    return time


def with_nan():
    q = arrays()["q"].copy()
    q[7, 1] = np.nan
    return q


BAD = [
    ({"q": with_nan()}, "q", "not a finite number of knee in row 7"),
    ({"time": arrays()["time"][::-1]}, "time", "does not increase in row 1"),
    ({"time": 1e3 * arrays()["time"]}, "time", "wrong sample rate"),
    ({"time": late(np.random.default_rng(0))}, "time", "sooner than half a sample"),
    (without(np.arange(50, 600, 60)[:, None] + np.arange(10)), "time", "gaps leave no piece"),
    ({"q": np.rad2deg(arrays()["q"]), "dq": None}, "q", "degrees"),
    ({"dq": np.rad2deg(arrays()["dq"])}, "dq", "times the slope of q"),
    ({"dq": -arrays()["dq"]}, "dq", "times the slope of q"),
    ({"target": arrays()["target"][:-1]}, "target", "wrong shape"),
    ({"target": None}, "target", "no such array"),
    ({"joint_names": None}, "joint_names", "no names"),
    ({"joint_names": ["hip", "hip"]}, "joint_names", "twice"),
    ({"q": np.full((ROWS, 2), "x")}, "q", "not an array of numbers"),
    ({"kp": [-3.0, 20.0]}, "kp", "wrong gain of hip"),
    ({"kd": np.stack([np.arange(ROWS), np.ones(ROWS)], axis=1)}, "kd", "the gain of hip changes"),
    ({"gyro": np.full((ROWS, 3), 0.3)}, "gyro", "the base turns"),
]


@pytest.mark.parametrize(("changes", "name", "words"), BAD, ids=[words.replace(" ", "_") for *_, words in BAD])
def test_unusable_logs_are_refused_in_one_line(tmp_path, changes, name, words):
    file = save(tmp_path, **changes)
    with pytest.raises(ConfigError) as info:
        read_log(file)
    assert info.value.key == f"{file}: {name}" and words in message(info)


def test_pickles_of_strangers_do_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    np.savez(tmp_path / "log.npz", **{**arrays(), "q": np.array([Trap()], dtype=object)})
    torch.save({"time": Trap()}, tmp_path / "log.pt")
    (tmp_path / "log.csv").write_bytes((tmp_path / "log.pt").read_bytes())
    (tmp_path / "log.mcap").write_bytes((tmp_path / "log.pt").read_bytes())
    for kind in ("npz", "pt", "csv", "mcap", "txt", "missing.npz"):
        with pytest.raises(ConfigError) as info:
            read_log(tmp_path / f"log.{kind}")
        assert message(info).startswith(str(tmp_path / f"log.{kind}"))
    assert not (tmp_path / "ran").exists()


def test_gaps_cut_the_log_into_pieces(tmp_path, capsys):
    log = read_log(save(tmp_path, **without(np.arange(300, 320))))
    assert log.pieces == [slice(0, 300), slice(300, 580)]
    assert "1 gaps" in capsys.readouterr().err


def test_names_and_orders_are_matched(tmp_path):
    log = matched(read_log(save(tmp_path)), ["robot/knee_joint", "Hip"], RANGE)
    assert np.array_equal(log.q, arrays()["q"][:, ::-1]) and log.joints == ["robot/knee_joint", "Hip"]
    for joints, word in ((["hip", "ankle"], "ankle"), (["hip"], "knee")):
        with pytest.raises(ConfigError) as info:
            matched(log, joints, None)
        assert word in info.value.problem
    with pytest.raises(ConfigError, match="outside of its range"):
        matched(log, ["hip", "knee"], RANGE + 2.5)


def test_noise_is_that_of_the_sensor(tmp_path):
    q = arrays()["q"] + np.random.default_rng(0).normal(0.0, 0.002, (ROWS, 2))
    log = read_log(save(tmp_path, q=q))
    assert log.noise(log.q, 1e-4) == pytest.approx(0.002, rel=0.15)


def test_held_targets_are_late_by_the_delay():
    time = np.arange(100) / HZ
    log = Log("", ["a"], time, np.arange(100.0)[:, None], np.zeros((100, 1)))
    whole, half = (log.held_targets(slice(0, 100), 1 / HZ, 50, steps / HZ)[10:, 0] for steps in (2.0, 2.5))
    assert whole == pytest.approx(np.arange(8.0, 48.0)) and half == pytest.approx(np.arange(7.5, 47.5))


def test_pace_file_needs_names(tmp_path):
    own = arrays()
    content = {"time": own["time"], "dof_pos": own["q"], "des_dof_pos": own["target"]}
    torch.save({name: torch.tensor(value) for name, value in content.items()}, tmp_path / "log.pt")
    with pytest.raises(ConfigError, match="joint_names"):
        read_log(tmp_path / "log.pt")
    log = read_log(tmp_path / "log.pt", ["hip", "knee"])
    assert np.allclose(log.target, own["target"]) and log.dq is None


# Bags


def bag(folder: Path, topics, storage="sqlite3"):
    """Write a bag: topic -> (type, messages as (time [s], bytes or message))."""
    rosbag2 = pytest.importorskip("rosbags.rosbag2")
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_JAZZY)
    plugin = rosbag2.StoragePlugin.MCAP if storage == "mcap" else rosbag2.StoragePlugin.SQLITE3
    with rosbag2.Writer(folder, version=9, storage_plugin=plugin) as writer:
        for topic, (kind, rows) in topics.items():
            own = {"typestore": store} if kind in store.types else {"msgdef": "uint8 mode\n", "rihs01": "0"}
            connection = writer.add_connection(topic, kind, **own)
            for stamp, row in rows:
                raw = row if isinstance(row, bytes) else bytes(store.serialize_cdr(row, kind))
                writer.write(connection, round(1e9 * stamp) + 10**18, raw)
    return folder


@pytest.mark.parametrize(("family", "storage"), [("go", "sqlite3"), ("hg", "mcap")])
def test_unitree_bag_is_read(tmp_path, family, storage):
    names = next(names for names in ORDERS["unitree"] if len(names) == (12 if family == "go" else 29))
    count, time = len(names), np.arange(400) / HZ
    q = 0.3 * np.sin(2.0 * time[:, None] + np.arange(count))
    state, order = (np.zeros(400, UNITREE[f"unitree_{family}/Low{kind}"]) for kind in ("State", "Cmd"))
    state["tick"], state["motors"]["q"][:, :count] = np.rint(1e3 * time) + 5000, q
    state["motors"]["dq"][:, :count] = 0.6 * np.cos(2.0 * time[:, None] + np.arange(count))
    motors = order["motors"]
    motors["q"][:, :count], motors["kp"][:, :count], motors["kd"][:, :count] = q + 0.1, 20.0, 0.5
    motors["tau"][:, 0] = 2.0  # 0.1 rad at this stiffness

    def rows(messages, ahead):
        return [(t - ahead, b"\0\1\0\0" + row.tobytes()) for t, row in zip(time, messages, strict=True)]

    kind = f"unitree_{family}/msg/Low"
    topics = {"/lowstate": (f"{kind}State", rows(state, 0.0)), "/lowcmd": (f"{kind}Cmd", rows(order, 0.001))}
    log = read_log(bag(tmp_path / "bag", topics, storage))
    assert log.joints == [*names] and log.kp == pytest.approx(20.0) and log.kd == pytest.approx(0.5)
    assert np.allclose(log.q, q, atol=1e-6) and log.time[0] == pytest.approx(5.0)
    assert np.allclose(log.target[:, 1:], q[:, 1:] + 0.1, atol=1e-6) and np.allclose(log.target[:, 0], q[:, 0] + 0.2)


def test_ros_bag_is_read(tmp_path):
    pytest.importorskip("rosbags")
    from rosbags.typesys import Stores, get_typestore

    types, own = get_typestore(Stores.ROS2_JAZZY).types, arrays()
    state, order, point, header, stamp, duration = (
        types[name]
        for name in (
            *("sensor_msgs/msg/JointState", "trajectory_msgs/msg/JointTrajectory"),
            *("trajectory_msgs/msg/JointTrajectoryPoint", "std_msgs/msg/Header"),
            *("builtin_interfaces/msg/Time", "builtin_interfaces/msg/Duration"),
        )
    )
    none = np.zeros(0)

    def head(t):
        return header(stamp(int(t) + 7, round(1e9 * (t % 1.0))), "")

    def row(q):
        return point(q, none, none, none, duration(0, 0))

    times = own["time"].tolist()
    states = [(t, state(head(t), ["hip", "knee"], own["q"][i], own["dq"][i], none)) for i, t in enumerate(times)]
    orders = [(t, order(head(t), ["knee", "hip"], [row(own["target"][i, ::-1].copy())])) for i, t in enumerate(times)]
    topics = {"/joint_states": ("sensor_msgs/msg/JointState", states)}
    with pytest.raises(ConfigError, match="no commands"):
        read_log(bag(tmp_path / "half", topics))
    log = read_log(bag(tmp_path / "bag", {**topics, "/arm/t": ("trajectory_msgs/msg/JointTrajectory", orders)}))
    assert log.joints == ["hip", "knee"] and log.dq is not None
    assert np.allclose(log.target, own["target"]) and np.allclose(log.dq, own["dq"])
    assert log.time[0] == pytest.approx(7.0) and log.kp is None


def test_missing_reader_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "bag").mkdir()
    monkeypatch.setitem(__import__("sys").modules, "rosbags.rosbag2", None)
    with pytest.raises(ConfigError, match="logs"):
        logs.read_log(tmp_path / "bag")
