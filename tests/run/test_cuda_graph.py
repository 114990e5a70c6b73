"""Tests of CUDA graphs of rollout and update: replay with a CPU stand-in, and the choice of what to capture."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gpusim_rl.api import prepare
from gpusim_rl.distributed import actors, data_parallel
from gpusim_rl.distributed.data_parallel import Processes
from gpusim_rl.run.cuda_graph import SEGMENTS, WARM_UP, Graphs, NotCapturableError, choose_graph, in_place
from gpusim_rl.run.cuda_graph import GraphChoice as Choice
from gpusim_rl.run.held_objects import generators_of
from gpusim_rl.run.stop_signal import IterationLeftError
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.sim.warp import WarpGraphs
from helpers import fake_cuda_graph
from helpers.fake_cuda_graph import Recorded, Recorder, differences_of_replays, without_shortcuts
from helpers.training import Faulty, FaultyConfig, differences, make_trainer
from helpers.watched import watched  # noqa: F401

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Reassigning(Faulty):
    """Task that reassigns its state attributes, one of them to the old value of another."""

    def __init__(self, cfg: FaultyConfig, sim: Any) -> None:
        super().__init__(cfg, sim)
        self.now = torch.zeros(self.num_envs)
        self.before = torch.zeros(self.num_envs)

    def reset(self, where):
        super().reset(where)
        self.now, self.before = (x.masked_fill(where, 0.0) for x in (self.now, self.before))

    def rewards(self):
        self.before = self.now
        self.now = self.robot.joint_pos[:, 0] + 0.5 * self.before
        return super().rewards() | {"change": self.now - self.before}


def trained(
    graphs: type[Graphs], mode: str, task: Any, folder: Path, config: Any = None, iterations: int = 7, /, **changes: Any
) -> tuple[Trainer, dict[str, Any]]:
    """Train with segments that run through `graphs`; return trainer and state."""
    trainer = make_trainer(task, folder, config, sim="mjwarp", device="cpu", max_iterations=iterations, **changes)
    return run_through(trainer, graphs, mode, iterations)


def run_through(
    trainer: Trainer, graphs: type[Graphs], mode: str, iterations: int, **more: Any
) -> tuple[Trainer, dict[str, Any]]:
    without_shortcuts(trainer.env.sim)  # type: ignore[attr-defined]
    more |= {"generators": generators_of(trainer.algorithm, CPU), "stateful": trainer.collector.graphs._stateful}
    trainer.collector.graphs = graphs(Choice(mode, "test"), CPU, **more)
    with trainer.logging() as log:
        for _ in range(iterations):
            trainer.iterate(log)
        return trainer, trainer.state_dict()


def unequal(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [path for path in differences(a, b) if not path.startswith(("/elapsed_s", "/wandb_id", "/config", "/overr"))]


RECURRENT = {"ppo": {"network": {"rnn": "lstm"}}, "task": {"episode_length": 9}}
LINEAR = {"ppo": {"schedule": "linear"}}
NOISY_IMAGES = {
    "task": {
        "_target_": "helpers.painted.Painted",
        "episode_length": 9,
        "observations": {"camera": {"shift": 2, "brightness": [0.8, 1.2]}},
    }
}


def draw(low: float, high: float, operation: str, distribution: str, **more: Any) -> dict[str, Any]:
    return {"range": [low, high], "operation": operation, "distribution": distribution, **more}


RAMP = {"schedule": "linear", "schedule_steps": 40}
RANDOMISED = {
    "task": {
        "episode_length": 20,
        "randomize": True,
        "randomization_params": {
            "frequency": 15,
            "observations": draw(0.0, 0.02, "additive", "gaussian", range_correlated=[0.0, 0.01], **RAMP),
            "actions": draw(0.0, 0.05, "additive", "uniform", **RAMP),
            "latency": {"range": [0, 2]},
            "sim_params": {"gravity": draw(0.0, 0.4, "additive", "gaussian")},
            "actor_params": {
                "ant": {
                    "pushes": {"interval_s": [0.05, 0.2], "velocity": [0.0, 0.5]},
                    "dof_properties": {"damping": draw(0.5, 1.5, "scaling", "loguniform", interval_s=0.1)},
                    "rigid_body_properties": {"mass": draw(0.5, 1.5, "scaling", "uniform")},
                    "rigid_shape_properties": {"friction": draw(0.7, 1.3, "scaling", "uniform", setup_only=True)},
                }
            },
        },
    }
}


def recordings(pieces: list[Any]) -> list[Recorded]:
    """Return the recordings of a segment, without the simulator launches between them."""
    return [replay.__self__ for replay in pieces[::2]]


@pytest.mark.parametrize(
    ("mode", "task", "overrides"),
    [
        pytest.param("rollout", "Ant", RANDOMISED, marks=pytest.mark.slow),
        pytest.param("rollout", "Cartpole", RECURRENT, marks=pytest.mark.slow),
        ("rollout", Faulty, LINEAR),  # separate critic observations and a diverging env
        pytest.param("rollout", "Cartpole", NOISY_IMAGES, marks=pytest.mark.slow),
        pytest.param("rollout", Reassigning, {}, marks=pytest.mark.slow),
        pytest.param("step", "Cartpole", RECURRENT, marks=pytest.mark.slow),
        pytest.param("split", "Ant", RANDOMISED, marks=pytest.mark.slow),
        pytest.param("split", Reassigning, {}, marks=pytest.mark.slow),
        pytest.param("update", Faulty, LINEAR, marks=pytest.mark.slow),
    ],
)
def test_graph_replay_equals_eager_run(mode, task, overrides, tmp_path):
    config = None if isinstance(task, str) else FaultyConfig(episode_length=11, critic=True, speed_at=29)
    eager = trained(Graphs, "off", task, tmp_path / "eager", config, **overrides)[1]
    trainer, state = trained(Recorder, mode, task, tmp_path / "graph", config, **overrides)
    captured = trainer.collector.graphs._captured
    assert set(captured) == set(SEGMENTS[mode])
    assert all(recording.replays >= 4 for pieces, _ in captured.values() for recording in recordings(pieces))
    if mode == "split":
        assert len(recordings(captured["split"][0])) >= 3, "physics and reset between recordings"
    assert trainer.collector.graphs.choice == Choice(mode, "test"), "no fallback"
    assert unequal(eager, state) == []


class Twin(Processes):
    """Two identical processes; a sum is twice the value of one."""

    def __init__(self) -> None:
        self.size, self._launch = 2, lambda launch: launch()

    def share(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def any(self, *flags: bool) -> tuple[bool, ...]:
        return flags


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("sac", marks=pytest.mark.slow)])
def test_all_reduce_runs_between_graphs_of_an_update(algorithm, tmp_path, monkeypatch):
    monkeypatch.setattr(data_parallel, "_add_up", lambda flat: flat.mul_(2.0))
    small = (
        {"updates": 2, "batch_size": 16, "learning_starts": 16, "replay": {"capacity": 800}}
        if algorithm == "sac"
        else {}
    )

    def state_after(graphs: type[Graphs], mode: str) -> tuple[Trainer, dict[str, Any]]:
        collective = Twin()
        changes: dict[str, Any] = {"log": {"console": "quiet", "dir": str(tmp_path / mode)}, algorithm: small}
        changes |= {"sim": "mjwarp", "device": "cpu", "num_envs": 8, "max_iterations": 7}
        trainer = actors.make_trainer(prepare("Cartpole", algo=algorithm, **changes), collective)
        return run_through(trainer, graphs, mode, 7, collective=collective)

    eager = state_after(Graphs, "off")[1]
    trainer, state = state_after(Recorder, "update")
    pieces = trainer.collector.graphs._captured["update"][0]
    assert len(recordings(pieces)) == len(pieces) // 2 + 1 > 4 and len(pieces) % 2
    assert unequal(eager, state) == []


@pytest.mark.slow
def test_replayed_update_skips_the_same_minibatches_as_eager(tmp_path):
    config = FaultyConfig(huge_reward_at=29, huge_reward=1e18, nan_control_at=38)
    raw = {"ppo": {"normalize_value": False, "schedule_per": "minibatch", "value_coef": 1e10}}
    eager = trained(Graphs, "off", Faulty, tmp_path / "eager", config, **raw)[1]
    trainer, state = trained(Recorder, "rollout", Faulty, tmp_path / "graph", config, **raw)
    assert set(trainer.collector.graphs._captured) == {"rollout", "update"}
    assert state["algorithm"]["skipped"] > 0 and unequal(eager, state) == []
    assert all(value.isfinite().all() for value in state["policy"].values())


@pytest.mark.parametrize("mode", ["rollout", "split"])
def test_graph_registers_only_generators_it_draws_from(mode, tmp_path):
    """Torch launches two kernels per registered generator before each replay."""
    trainer, _ = trained(Recorder, mode, "Cartpole", tmp_path, None, 5)
    graphs, algorithm = trainer.collector.graphs, trainer.algorithm
    assert set(graphs._captured) == set(SEGMENTS[mode])
    *acting, update = graphs.registered
    assert update == [algorithm._shuffle_generator]
    assert acting == ([[algorithm.exploration._generator]] if mode == "rollout" else [[] for _ in acting])


def test_update_that_cannot_be_captured_is_reported():
    graphs = Recorder(Choice("rollout", "test"), CPU)
    graphs._fall_back("update", "x")
    assert graphs.choice.mode == "rollout only" and "update" in graphs.choice.reason


class Broken(Graphs):
    """Capture that fails like torch's after a device read: ending the capture fails too."""

    def _record(self, body: Any) -> Any:
        try:
            return body()
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_failed_capture_reports_first_error_with_its_line(caplog):
    graphs = Broken(Choice("update", "test"), CPU)

    def reads() -> int:
        if graphs._capturing:
            raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors might ...")
        return 7

    assert [graphs.run("update", reads) for _ in range(4)] == [7] * 4
    line = reads.__code__.co_firstlineno + 2
    expected = rf"operation not permitted when stream is capturing at \S*test_cuda_graph\.py:{line}"
    assert re.search(f": {expected}$", graphs.choice.reason)
    assert re.search(f"eagerly .*: {expected}", caplog.text)


FALLBACKS = {"rollout": "single control steps", "step": "in pieces", "split": "stepping", "update": "updating"}


def graph_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "CUDA graph" in record.getMessage()]


class Failing(Recorder):
    """Capture of these segments fails with a bare exception, like Warp if it cannot load a module."""

    segments: tuple[str, ...] = ()

    def _capture(self, segment: str, body: Any) -> Any:
        if segment in self.segments:
            raise Exception("Failed to load CUDA module 'solver'")
        return super()._capture(segment, body)


@pytest.mark.parametrize(
    ("failing", "mode"),
    [
        (("rollout",), "step"),
        (("rollout", "step", "split", "update"), "off"),
        pytest.param(("rollout", "step", "update"), "split only", marks=pytest.mark.slow),
    ],
)
def test_training_continues_after_each_graph_fallback(failing, mode, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(Failing, "segments", failing)
    eager = trained(Graphs, "off", "Cartpole", tmp_path / "eager")[1]
    with caplog.at_level(logging.WARNING):
        trainer, state = trained(Failing, "rollout", "Cartpole", tmp_path / "graph")
    reason = "Failed to load CUDA module 'solver' at "
    lines = graph_warnings(caplog)
    assert len(lines) == len(failing)
    assert all(FALLBACKS[segment] in line for segment, line in zip(failing, lines, strict=True))
    assert all(line.partition(": ")[2].startswith(reason) for line in lines)
    assert trainer.collector.graphs.choice.mode == mode and reason in trainer.collector.graphs.choice.reason
    assert set(trainer.collector.graphs._captured) == set(SEGMENTS[mode])
    assert unequal(eager, state) == []


class Looping(Recorder):
    """Capture that fails because torch graphs cannot contain Warp's loops."""

    def _record(self, body: Any) -> Any:
        def run_in_torch_graph(*_: Any) -> None:
            raise RuntimeError("a loop of Warp has changed the id of torch's capture")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fake_cuda_graph, "RUN", run_in_torch_graph)
            return super()._record(body)


def test_warp_loop_falls_back_to_split_capture(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer, state = trained(Looping, "rollout", "Cartpole", tmp_path)
    whole, step = graph_warnings(caplog)
    assert FALLBACKS["rollout"] in whole and FALLBACKS["step"] in step
    assert trainer.collector.graphs.choice.mode == "split"
    assert "a loop of Warp" in trainer.collector.graphs.choice.reason
    assert set(trainer.collector.graphs._captured) == {"split", "update"} and state["iteration"] == 7


def test_signal_during_capture_is_not_a_capture_failure(caplog):
    graphs = Recorder(Choice("rollout", "test"), CPU)

    def leaves() -> None:
        if graphs._capturing:
            raise IterationLeftError

    for _ in range(WARM_UP):
        graphs.run("rollout", leaves)
    with pytest.raises(IterationLeftError):
        graphs.run("rollout", leaves)
    assert graph_warnings(caplog) == [] and graphs.choice.mode == "rollout"


@pytest.mark.parametrize(
    ("wanted", "device", "sim_device", "physics_steps", "check", "mode"),
    [
        ("auto", CUDA, CUDA, 16, False, "rollout"),
        ("auto", CUDA, CUDA, 16 * 4 * 4, False, "step"),  # a short rollout of a task with RK4
        ("rollout", CUDA, CUDA, 256, False, "rollout"),
        ("off", CUDA, CUDA, 16, False, "off"),
        ("auto", CUDA, CPU, 16, False, "update"),
        ("rollout", CUDA, CUDA, 16, True, "update"),
        ("rollout", CPU, CPU, 16, False, "off"),
    ],
)
def test_graph_mode_follows_settings_and_devices(wanted, device, sim_device, physics_steps, check, mode):
    choice = choose_graph(wanted, device, sim_device, physics_steps=physics_steps, check_task=check)
    assert choice.mode == mode and choice.reason


class Stateful:
    def __init__(self) -> None:
        self.a, self.b, self.number = torch.zeros(2), torch.ones(2), 3


def test_in_place_copies_reassigned_tensors():
    stateful = Stateful()
    a, b = stateful.a, stateful.b
    with in_place([stateful]):
        stateful.b = stateful.a  # b gets the old a
        stateful.a = torch.full((2,), 7.0)
    assert stateful.a is a and stateful.b is b
    assert a.tolist() == [7.0, 7.0] and b.tolist() == [0.0, 0.0]


def test_in_place_copies_tuples_and_rejects_new_shapes():
    stateful = Stateful()
    stateful.hidden = before = (torch.zeros(2), torch.ones(3))  # type: ignore[attr-defined]
    with in_place([stateful]):
        stateful.hidden = (torch.full((2,), 5.0), before[1])  # type: ignore[attr-defined]
    assert stateful.hidden is before and before[0].tolist() == [5.0, 5.0]  # type: ignore[attr-defined]
    for name, value in (("hidden", before[:1]), ("a", torch.zeros(3))):
        kept = stateful.b
        with pytest.raises(NotCapturableError, match=rf"Stateful\.{name} changed its shape"), in_place([stateful]):
            stateful.b = torch.zeros(2)
            setattr(stateful, name, value)
        assert stateful.hidden is before and stateful.b is kept  # type: ignore[attr-defined]


@pytest.mark.parametrize(("segment", "other"), [("update", "rollout"), ("rollout", "update")])
def test_changing_python_number_disables_capture(segment, other, caplog):
    stateful = Stateful()
    graphs = Recorder(Choice("rollout", "test"), CPU, stateful=[stateful])

    def count() -> None:
        stateful.number += 1

    for _ in range(6):
        graphs.run(segment, count)
    assert stateful.number == 9 and "Stateful.number" in caplog.text
    assert graphs._segments == (other,)


def test_in_place_restores_object_after_an_error():
    stateful = Stateful()
    before = dict(vars(stateful))
    with pytest.raises(RuntimeError, match="in the middle"), in_place([stateful]):
        stateful.a, stateful.number, stateful.new = torch.full((2,), 9.0), 4, 5  # type: ignore[attr-defined]
        raise RuntimeError("in the middle")
    assert vars(stateful) == before and stateful.a is before["a"]


def test_warp_graphs_are_captured_once_and_equal_eager(tmp_path, monkeypatch):
    captures: list[Any] = []
    capture = WarpGraphs._capture
    monkeypatch.setattr(
        WarpGraphs, "_capture", lambda self, key, body: (captures.append(key), capture(self, key, body))
    )
    settings: dict[str, Any] = {"sim": "mjwarp", "device": "cpu", "task": {"episode_length": 20}}
    states = []
    for graph in (True, False):
        trainer = make_trainer("Ant", tmp_path / str(graph), **settings, **{"sim.graph": graph})
        with trainer.logging() as log:
            trainer.iterate(log)
            once = len(captures)
            trainer.iterate(log)
            trainer.iterate(log)
            states.append(trainer.state_dict())
        assert len(captures) == once, "no capture in steady state"
    assert len(captures) == len(set(captures)) > 0, "no capture without graphs"
    assert unequal(*states) == []


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("mode", ["rollout", "step", "split"])
def test_graph_replay_with_cameras_equals_eager_run(mode: str, tmp_path: Path) -> None:
    warp: dict = {"sim": {"name": "mjwarp", "num_threads": 1}, "device": "cpu", "max_iterations": 7}
    warp["task"] = {"episode_length": 9}
    assert differences_of_replays(lambda folder: make_trainer("Cartpole", folder, **warp), mode, tmp_path) == []
