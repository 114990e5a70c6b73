"""CUDA graphs of rollout and update: equality with eager code, and no transfers."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl.diagnose.transfers import audit, our_loop, violations
from gpusim_rl.learn.distributions import DiagonalGaussian
from gpusim_rl.learn.rollout import Rollout
from gpusim_rl.run import background_compile
from gpusim_rl.run.cuda_graph import SEGMENTS, WARM_UP
from gpusim_rl.run.trainer import Trainer
from helpers.training import Faulty, FaultyConfig, leaves, make_trainer, same, the_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at CUDA start; required by torch_deterministic

DEVICE = "cuda"
DECISIVE = pytest.mark.decisive
CAPTURED = WARM_UP + 1
"""Iterations until everything is captured and replayed once."""


class Reading(Faulty):
    """Task that reads a value on the host, which prevents capture."""

    def rewards(self):
        terms = super().rewards()
        total = sum(term.sum() for term in terms.values())
        return terms | {"read": torch.full((self.num_envs,), 1e-9 * float(total), device=self.device)}  # this line


READS_AT = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("# this line"))


def make(task: Any, folder: Path, config: Any = None, /, **overrides: Any) -> Any:
    """Build a trainer of 64 envs with MuJoCo Warp on CUDA."""
    settings: dict[str, Any] = {"sim": "mjwarp", "device": DEVICE, "num_envs": 64, "max_iterations": 1000}
    return make_trainer(task, folder, config, **{**settings, **overrides})


@contextmanager
def running(trainer: Trainer) -> Iterator[Callable[[int], None]]:
    """Yield a function that runs iterations on the graphs' stream, without saving."""
    trainer.save = lambda log: None  # type: ignore[method-assign]
    with trainer.logging() as log:

        def iterate(count: int) -> None:
            for _ in range(count):
                trainer.iterate(log)

        yield iterate


def trained(task: Any, folder: Path, config: Any = None, iterations: int = 5, /, **overrides: Any) -> dict[str, Any]:
    """Train and return the state; check that all expected segments were captured."""
    trainer = make(task, folder, config, **overrides)
    mode = trainer.collector.graphs.choice.mode
    with running(trainer) as iterate:
        iterate(iterations)
        assert trainer.collector.graphs._captured.keys() == set(SEGMENTS[mode]), trainer.collector.graphs.choice
        return trainer.state_dict()


def distance(a: dict[str, Any], b: dict[str, Any]) -> tuple[float, list[str]]:
    """Return the distance of two states and the paths of entries that are not bit-identical.

    The distance is the largest difference of weights or the median difference of observations, since envs may diverge.
    """
    ignored = ("/elapsed_s", "/wandb_id", "/config", "/overrides")
    first, second = ({path: value for path, value in leaves(state) if not path.startswith(ignored)} for state in (a, b))
    assert first.keys() == second.keys()
    unequal = [path for path in first if not same(first[path], second[path])]
    far = 0.0
    for path in unequal:
        if path.startswith(("/policy", "/env/obs")):
            difference = (first[path].double() - second[path].double()).abs()
            far = max(far, float(difference.max() if path.startswith("/policy") else difference.median()))
    return far, unequal


def noise_of(rollout: Rollout) -> Tensor:
    """Return the noise of the actions, shape [T, N, actions]."""
    policy = DiagonalGaussian.stored(rollout.distribution)
    return (rollout.action - policy.mean) / policy.log_std.exp()


def parameters(trainer: Trainer) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in trainer.algorithm.policy.parameters()])


RECURRENT = {"ppo": {"network": {"rnn": "lstm"}}, "task": {"episode_length": 9}}
BF16 = {"ppo": {"precision": "bf16"}}
CRITIC = FaultyConfig(episode_length=11, critic=True)


def randomized(actor: str, pushes: dict[str, Any], episode_length: int) -> dict[str, Any]:
    """Build settings with randomized masses, noise, latency and pushes."""
    noise = {"range": [0.0, 0.02], "range_correlated": [0.0, 0.01], "operation": "additive", "distribution": "gaussian"}
    mass = {"range": [0.5, 1.5], "operation": "scaling", "distribution": "uniform"}
    params = {
        "observations": noise,
        "actions": noise,
        "latency": {"range": [0, 2]},
        "actor_params": {actor: {"rigid_body_properties": {"mass": mass}, "pushes": pushes}},
    }
    return {"task": {"episode_length": episode_length, "randomize": True, "randomization_params": params}}


# Without contacts, randomised envs are bit-identical too.
RANDOM_CARTPOLE = randomized("cartpole", {"interval_s": [0.05, 0.2], "force": [0.0, 5.0], "bodies": ["pole"]}, 9)
RANDOM_ANT = randomized("ant", {"interval_s": [0.1, 0.3], "velocity": [0.0, 0.5]}, 20)


@pytest.fixture(scope="module")
def eagerly(tmp_path_factory) -> Callable[..., list[dict[str, Any]]]:
    """Cached states of two eager trainings per task and settings."""
    known: dict[str, list[dict[str, Any]]] = {}

    def twice(task: Any, config: Any, settings: dict[str, Any]) -> list[dict[str, Any]]:
        key = f"{task} {settings}"
        if key not in known:
            folders = [tmp_path_factory.mktemp("eager") for _ in range(2)]
            known[key] = [trained(task, folder, config, graph="off", **settings) for folder in folders]
        return known[key]

    return twice


ANT = {"task": {"episode_length": 20}}


@pytest.mark.parametrize(
    ("mode", "task", "overrides"),
    [
        pytest.param("rollout", "Cartpole", {}, marks=DECISIVE),
        pytest.param("split", "Cartpole", {}, marks=DECISIVE),
        ("step", "Cartpole", {}),
        ("rollout", "Cartpole", RECURRENT),
        ("step", "Cartpole", RECURRENT),
        ("split", "Cartpole", RECURRENT),
        ("rollout", "Cartpole", BF16),
        ("rollout", Faulty, {}),  # with critic observations
        ("rollout", Faulty, {"ppo": {"schedule": "linear"}}),
        ("rollout", "Ant", ANT),
        ("step", "Ant", ANT),
        ("split", "Ant", ANT),
        ("rollout", "Cartpole", RANDOM_CARTPOLE),
        ("step", "Cartpole", RANDOM_CARTPOLE),
        ("split", "Cartpole", RANDOM_CARTPOLE),
        ("rollout", "Ant", RANDOM_ANT),
        ("step", "Ant", RANDOM_ANT),
    ],
)
def test_graph_equals_eager_code(mode, task, overrides, eagerly, tmp_path):
    """Graphs differ from eager code at most as much as two eager runs do; bit-identical if those are.

    `torch_deterministic` makes the kernels of torch and MuJoCo Warp deterministic. Otherwise physics with contacts is
    not: atomic additions order the constraints. Two eager runs measure the actual spread of the device.
    """
    config = CRITIC if task is Faulty else None
    settings = {"torch_deterministic": True, **overrides}
    once, twice = eagerly(task, config, settings)
    state = trained(task, tmp_path, config, graph=mode, **settings)
    assert state["iteration"] == once["iteration"] == 5
    for generator in ("noise_generator", "shuffle_generator"):
        assert same(state["algorithm"][generator], once["algorithm"][generator])
    spread, chaotic = distance(once, twice)
    apart, unequal = distance(once, state)
    if not chaotic:
        assert unequal == []
    # Weights move by about 0.05, so a wrong graph would exceed this.
    assert apart <= 10.0 * spread + 1e-3


@pytest.mark.parametrize("mode", [pytest.param("rollout", marks=DECISIVE), "step", "split"])
def test_every_replay_draws_new_noise(mode, tmp_path):
    trainer = make("Cartpole", tmp_path, graph=mode)
    with running(trainer) as iterate:
        iterate(CAPTURED)
        noises, states = [], []
        for _ in range(3):
            trainer.collector.collect()
            noises.append(noise_of(trainer.algorithm.rollout))
            states.append(trainer.algorithm.exploration._generator.get_state())
        assert not same(states[0], states[1]) and not same(states[1], states[2])
        steps = torch.cat([noise.flatten(1) for noise in noises])  # every step of every rollout
        assert torch.unique(steps[:, 0]).numel() == len(steps)
        assert 0.9 < float(steps.std()) < 1.1 and abs(float(steps.mean())) < 0.1

        before = trainer.algorithm._shuffle_generator.get_state()
        iterate(1)
        assert not same(before, trainer.algorithm._shuffle_generator.get_state())


@pytest.mark.parametrize("mode", ["rollout", "step", "split"])
def test_every_replay_draws_new_randomization(mode, tmp_path):
    """Masses, noise, delays and pushes are drawn in each replay instead of repeated from the capture."""
    trainer = make("Cartpole", tmp_path, graph=mode, **RANDOM_CARTPOLE)
    randomizer, horizon = trainer.env.randomizer, trainer.algorithm.horizon
    mass = trainer.env.sim.param("body_mass", "cartpole", ["pole"])
    noise = trainer.env._groups.sensors._whole_noise

    def drawn() -> dict[str, Tensor]:
        found = {"mass": mass.value, "action noise": randomizer.action_noise.noise, "delay": randomizer.latency.delay}
        found |= {"observation noise": noise.offset, "pushes": randomizer.pushes[0].wait}
        return {name: value.clone() for name, value in found.items()}

    with running(trainer) as iterate:
        iterate(CAPTURED)
        seen, steps = [drawn()], int(randomizer.steps)
        for count in range(1, 4):
            trainer.collector.collect()
            trainer.collector.collect()  # every env is reset at least once in 16 control steps
            seen.append(drawn())
            assert int(randomizer.steps) == steps + 2 * count * horizon
    for before, after in itertools.pairwise(seen):
        for name in before:
            assert not torch.equal(before[name], after[name]), name
    assert seen[-1]["mass"].unique().numel() == trainer.cfg.num_envs
    assert set(seen[-1]["delay"].tolist()) == {0, 1, 2}


@pytest.mark.parametrize("mode", ["rollout", "step", "split"])
@pytest.mark.parametrize("task", ["Cartpole", "Ant"])
def test_steady_state_allocates_nothing(task, mode, tmp_path):
    trainer = make(task, tmp_path, graph=mode)

    def counters() -> dict[str, int]:
        stats = torch.cuda.memory_stats(DEVICE)
        names = ("segment.all.allocated", "reserved_bytes.all.current", "allocated_bytes.all.current")
        return {name: stats[name] for name in names} | {"memory_allocated": torch.cuda.memory_allocated(DEVICE)}

    def allocations() -> int:
        return torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]

    with running(trainer) as iterate:
        iterate(CAPTURED + 2)
        before = counters()
        iterate(10)
        assert counters() == before, "metrics rows reuse memory reserved by torch"

        if mode != "rollout":
            return  # other modes store rollout steps eagerly
        count = allocations()
        for _ in range(10):
            trainer.collector.collect()
            trainer.collector.metrics.record_update(trainer.collector.graphs.run("update", trainer.algorithm.update))
        assert allocations() == count


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "rollout"])
def test_steady_state_compiles_nothing(mode, tmp_path):
    trainer = make("Cartpole", tmp_path, graph=mode, compile="all")
    with running(trainer) as iterate:
        iterate(CAPTURED + 1)
        assert trainer.collector.graphs._captured.keys() == set(SEGMENTS[mode]), trainer.collector.graphs.choice
        counts = torch._dynamo.utils.counters["stats"]
        graphs = counts["unique_graphs"]
        assert graphs > 0
        before = parameters(trainer)
        with torch._dynamo.config.patch(error_on_recompile=True):
            iterate(10)
        assert counts["unique_graphs"] == graphs
        assert not torch.equal(parameters(trainer), before)


@pytest.mark.slow
def test_background_compilation_fills_cache_and_graphs_are_recaptured(tmp_path, monkeypatch):
    monkeypatch.setattr(background_compile, "MEASURED_S", 0.0)
    trainer = make("Cartpole", tmp_path, graph="rollout", compile="auto", max_iterations=10**9)
    with running(trainer) as iterate:
        while trainer.start.compile.mode == "later":
            iterate(1)
        assert trainer.start.compile.mode == "all", trainer.start.compile
        assert trainer.collector.graphs._captured == {}
        torch._dynamo.utils.counters.clear()
        before = parameters(trainer)
        iterate(CAPTURED + 1)
        assert trainer.collector.graphs._captured.keys() == {"rollout", "update"}, trainer.collector.graphs.choice
        found = torch._dynamo.utils.counters["inductor"]
        assert found["fxgraph_cache_hit"] > 0 and found["fxgraph_cache_miss"] == 0, found
        assert parameters(trainer).isfinite().all() and not torch.equal(parameters(trainer), before)


@pytest.mark.parametrize("mode", ["rollout", "step", "split", "off"])
@pytest.mark.parametrize("task", [pytest.param("Cartpole", marks=DECISIVE), "Ant"])
def test_torch_detects_no_sync(task, mode, tmp_path):
    """Cover whole iterations including metrics, which are copied asynchronously and read an interval later."""
    trainer = make(task, tmp_path, graph=mode)
    with running(trainer) as iterate:
        iterate(CAPTURED + 1)
        torch.cuda.set_sync_debug_mode("error")
        try:
            iterate(3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert trainer.iteration == CAPTURED + 4


@DECISIVE
def test_task_with_sync_trains_eagerly_and_reports_line(tmp_path, caplog):
    trainer = make(Reading, tmp_path, FaultyConfig(), graph="rollout")
    with caplog.at_level(logging.WARNING), running(trainer) as iterate:
        iterate(CAPTURED)
        before = parameters(trainer)
        iterate(3)
        assert not torch.equal(parameters(trainer), before)
    assert torch.isfinite(parameters(trainer)).all()
    lines = [record.getMessage() for record in caplog.records if "CUDA graph" in record.getMessage()]
    failed = ["the rollout", "the step", "the step in pieces"]
    assert [line.removeprefix("CUDA graph of ").partition(" failed")[0] for line in lines] == failed
    assert all(f"test_graph_cuda.py:{READS_AT}" in line for line in lines)
    assert trainer.collector.graphs.choice.mode == "update"
    assert set(trainer.collector.graphs._captured) == {"update"}


def test_failed_capture_changes_no_result(tmp_path):
    """After a failed capture no step is lost and no random number is used twice."""
    states = []
    for name, mode in (("off", "off"), ("rollout", "rollout")):
        trainer = make(Reading, tmp_path / name, FaultyConfig(), graph=mode)
        with running(trainer) as iterate:
            iterate(5)
            states.append(trainer.state_dict())
    assert same(*(state["algorithm"]["noise_generator"] for state in states))
    assert distance(*states)[0] < 1e-2


def test_failed_update_capture_keeps_rollout_graph(tmp_path, monkeypatch, caplog):
    """The rollout's graph keeps its generator; torch's allocator and generators leave capture mode."""
    trainer = make("Cartpole", tmp_path, graph="rollout")
    update = trainer.algorithm.update

    def reads(*args: Any) -> dict[str, Tensor]:
        stats = update(*args)
        float(stats["loss/value"])
        return stats

    monkeypatch.setattr(trainer.algorithm, "update", reads)
    with running(trainer) as iterate:
        iterate(CAPTURED)
        assert set(trainer.collector.graphs._captured) == {"rollout"} and "graph of the update" in caplog.text
        torch.cuda.empty_cache()
        torch.rand(3, device=DEVICE)
        states = []
        for _ in range(3):
            states.append(trainer.algorithm.exploration._generator.get_state())
            before = trainer.algorithm.rollout.action.clone()
            iterate(1)
            assert not torch.equal(trainer.algorithm.rollout.action, before)
        assert not same(states[0], states[1]) and not same(states[1], states[2]), "generator states advance"
    assert torch.isfinite(parameters(trainer)).all()


@pytest.mark.parametrize(
    "mode", [pytest.param("rollout", marks=DECISIVE), "step", pytest.param("split", marks=DECISIVE)]
)
def test_replay_writes_only_memory_of_graph(mode, tmp_path):
    """Warp pauses torch's capture at each solver loop; memory allocated then must still belong to the graph."""
    trainer = make("Ant", tmp_path, graph=mode)
    with running(trainer) as iterate:
        iterate(CAPTURED)
        reserved, others = torch.cuda.memory_reserved(DEVICE), []
        for size in (1 << 25, 1 << 22, 1 << 20, 1 << 16, 1 << 12, 1 << 9):  # all other memory reserved by torch
            while torch.cuda.memory_reserved(DEVICE) == reserved:
                others.append(torch.full((size,), 7, dtype=torch.uint8, device=DEVICE))
            reserved = torch.cuda.memory_reserved(DEVICE)
        for _ in range(3):
            trainer.collector.collect()
            trainer.collector.graphs.run("update", trainer.algorithm.update)
        assert all(bool((other == 7).all()) for other in others)


def test_kernels_of_graph_stay_loaded(tmp_path):
    """Warp unloads changed modules unless a known graph holds their kernels."""
    wp = pytest.importorskip("warp")
    trainer = make("Cartpole", tmp_path, graph="rollout", **{"sim.graph": False})  # no graphs by Warp
    with running(trainer) as iterate:
        iterate(CAPTURED)
        wp.get_module("mujoco_warp._src.smooth").unload()
        before = trainer.algorithm.rollout.action.clone()
        iterate(2)
        torch.cuda.synchronize()
    assert not torch.equal(trainer.algorithm.rollout.action, before)
    assert all(torch.isfinite(value).all() for value in trainer.algorithm.rollout.obs.values())


@pytest.mark.parametrize(("first", "then"), [("cpu", DEVICE), (DEVICE, "cpu")])
def test_checkpoint_moves_between_cpu_and_cuda(first, then, tmp_path):
    began = make("Cartpole", tmp_path, device=first, max_iterations=2)
    began.train()
    resumed = make("Cartpole", tmp_path, device=then, checkpoint=str(the_run(tmp_path)))
    assert resumed.iteration == 2
    torch.testing.assert_close(parameters(resumed).cpu(), parameters(began).cpu(), rtol=0.0, atol=0.0)
    for group, value in began.collector.obs.items():
        torch.testing.assert_close(resumed.collector.obs[group].cpu(), value.cpu(), rtol=0.0, atol=0.0)
    on_cuda = resumed.start.device.type == "cuda"
    [settings] = resumed.algorithm.steps.optimizer.param_groups
    assert settings["capturable"] == on_cuda and settings["lr"] is resumed.algorithm.steps.learning_rate
    steps = [state["step"] for state in resumed.algorithm.steps.optimizer.state.values()]
    assert {step.device.type for step in steps} == {resumed.start.device.type} if on_cuda else True
    before = parameters(resumed)
    with running(resumed) as iterate:
        iterate(CAPTURED)
        assert resumed.collector.graphs._captured.keys() == set(SEGMENTS[resumed.collector.graphs.choice.mode])
        assert resumed.collector.graphs.choice.mode == ("rollout" if on_cuda else "off")
        iterate(2)
    after = parameters(resumed)
    assert torch.isfinite(after).all() and not torch.equal(after, before)
    assert all(float(step) > float(CAPTURED) for step in steps), "Adam's step count continues"


def test_interrupted_run_equals_uninterrupted_run(tmp_path):
    whole, again = (trained("Cartpole", tmp_path / name, None, 6, graph="rollout") for name in ("whole", "again"))
    folder = tmp_path / "resumed"
    make("Cartpole", folder, graph="rollout", max_iterations=2).train()
    resumed = make("Cartpole", folder, graph="rollout", checkpoint=str(the_run(folder)), max_iterations=1000)
    with running(resumed) as iterate:
        iterate(4)  # first eager, then captured
        assert resumed.collector.graphs._captured.keys() == set(SEGMENTS["rollout"])
        state = resumed.state_dict()
    assert state["iteration"] == whole["iteration"] == 6
    assert same(*(each["algorithm"]["noise_generator"].cpu() for each in (state, whole)))
    spread, _ = distance(whole, again)
    assert distance(whole, state)[0] <= 10.0 * spread + 1e-3


def test_cpu_physics_still_captures_update(tmp_path):
    trainer = make("Cartpole", tmp_path, device="auto", sim_device="cpu", rl_device=DEVICE)
    assert trainer.collector.graphs.choice.mode == "update" and "cpu" in str(trainer.collector.graphs.choice)
    assert trainer.env.device.type == "cpu" and trainer.start.device.type == DEVICE
    with running(trainer) as iterate:
        iterate(CAPTURED)
        before = parameters(trainer)
        iterate(2)
        assert set(trainer.collector.graphs._captured) == {"update"}
    assert torch.isfinite(parameters(trainer)).all() and not torch.equal(parameters(trainer), before)


@pytest.mark.parametrize("network", [{}, {"rnn": "lstm"}])
def test_bf16_graph_uses_current_weights(network, tmp_path):
    """Autocast caches rounded weights, which a graph would keep from its capture."""
    trainer = make("Cartpole", tmp_path, graph="rollout", ppo={"precision": "bf16", "network": network})
    assert trainer.algorithm.policy.reduced
    with running(trainer) as iterate:
        iterate(CAPTURED)
        for _ in range(4):
            before = parameters(trainer)
            iterate(1)
            assert not torch.equal(parameters(trainer), before)
            losses = {
                name: value for name, value in trainer.collector.metrics._latest.items() if name.startswith("loss/")
            }
            assert len(losses) >= 3 and all(torch.isfinite(value) for value in losses.values())
        # Current weights give the same actions without a graph; weights of the capture would not.
        trainer.collector.collect()
        last = trainer.algorithm.horizon - 1
        obs = {group: value[last] for group, value in trainer.algorithm.rollout.obs.items()}
        if not trainer.algorithm.policy.recurrent:
            mean, _ = trainer.algorithm.policy.act(obs, ())
            recorded = DiagonalGaussian.stored(trainer.algorithm.rollout.distribution[last]).mean
            torch.testing.assert_close(mean, recorded, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("schedule", ["adaptive", "linear"])
def test_learning_rate_changes_between_replays(schedule, tmp_path):
    start, horizon = 3e-5, 20
    ppo = {"schedule": schedule, "schedule_per": "epoch", "kl_threshold": 100.0, "learning_rate": start}
    trainer = make("Cartpole", tmp_path, graph="rollout", max_iterations=horizon, ppo=ppo)
    rates = []
    with running(trainer) as iterate:
        iterate(CAPTURED)
        for _ in range(3):
            rates.append(float(trainer.algorithm.steps.learning_rate))
            iterate(1)
        rates.append(float(trainer.algorithm.steps.learning_rate))
        in_use = trainer.algorithm.steps.optimizer.param_groups[0]["lr"]
    assert isinstance(in_use, Tensor) and float(in_use) == rates[-1]
    if schedule == "linear":  # the rate is set at the start of an update
        expected = [start * (1.0 - (CAPTURED - 1 + done) / horizon) for done in range(4)]
        assert rates == pytest.approx(expected, rel=1e-5)
    else:  # no policy change reaches that threshold
        assert all(later > earlier for earlier, later in itertools.pairwise(rates))


@pytest.mark.parametrize("mode", ["rollout", "step", "split"])
@pytest.mark.parametrize("task", ["Cartpole", "Ant"])
def test_profiler_sees_no_copy(task, mode, tmp_path):
    trainer = make(task, tmp_path, graph=mode)
    iterations = 3
    trainer.save = lambda log: None
    with trainer.logging() as log:
        result = audit(our_loop(trainer, log), warm_up=CAPTURED + 1, iterations=iterations)
    for phase in ("rollout", "update"):
        work = result.work[phase]
        assert work.kernels > 0 and work.busy_s > 0.0, "the profiler sees kernels of graphs"
        assert (work.to_device.count, work.to_host.count, sum(work.syncs.values())) == (0, 0, 0)
    assert result.work["log"].to_host.count == iterations, "one metrics row per iteration"
    assert violations(result, iterations) == []
