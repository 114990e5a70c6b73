"""Every task and algorithm on fake CUDA tensors: a steady iteration stays on the device, with recorded kernel counts.

docs/gpu.md explains what this proves.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gpusim_rl.tasks.cartpole import Cartpole
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from gpusim_rl.env import vec_env
from gpusim_rl.env.properties import PICTURES, SECTIONS
from gpusim_rl.run import capture_watch
from gpusim_rl.run.cuda_graph import WARM_UP, GraphChoice, Graphs
from gpusim_rl.run.held_objects import check_devices
from gpusim_rl.settings.discover import tasks
from gpusim_rl.settings.schema import ALGORITHMS
from gpusim_rl.spaces import ActionSpace, Box, MultiDiscrete
from helpers import fake_cuda as fake
from helpers.count_kernels import TABLE, predicted, tasks_of, torch_version
from helpers.fake_cuda import CUDA, PARTS, Placement, backward, fake_cuda, iterate
from helpers.fakes import Learner, RandomEnv, ppo_config
from helpers.gpu_kernels import count_launches, warp_versions
from helpers.off_policy import C51, settings_of
from helpers.predicted_time import COUNTED_ENVS, H100, cost_of
from helpers.watched import watched  # noqa: F401

DEFAULT_RUN = [("Ant", algo) for algo in ("ppo", "impala", "sac")] + [("HumanoidAMP", "amp")]
TRAININGS = [
    pytest.param(task, algo, id=f"{algo}-{task}", marks=() if (task, algo) in DEFAULT_RUN else pytest.mark.slow)
    for algo in ALGORITHMS
    for task in tasks_of(algo)
]
WATCHED = [pytest.param(*it.values, id=it.id, marks=[pytest.mark.slow] * (it.id != "ppo-Ant")) for it in TRAININGS]
UPDATE_TABLE = "; python tests/helpers/count_kernels.py rewrites the table"
OTHER_VERSION = 1.02
"""Allowed ratio to the recorded kernels with another version of torch."""
OTHER_WARP = 1.1
"""Allowed ratio to Warp's recorded launches with other versions of Warp or MuJoCo Warp."""
PREDICTION = 0.02
"""Relative tolerance of predicted times, which also depend on bytes."""


@pytest.fixture(scope="module", autouse=True)
def guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    reason = fake.why_not()
    if reason is not None:
        pytest.skip(reason)
    fake.load_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture
def cuda(guard: None):
    with fake_cuda():
        yield


launches = cache(count_launches)


@pytest.mark.parametrize(("task", "algo"), TRAININGS)
def test_iteration_stays_on_device_with_recorded_kernel_counts(task: str, algo: str) -> None:
    table = json.loads(TABLE.read_text())
    found, more = fake.count(task, algo), 1.0 if table["torch"] == torch_version() else OTHER_VERSION
    assert found.faults == []
    assert complaints(table["kernels"].get(algo, {}).get(task, {}), task, found.kernels, more) == []
    if table["warp"] == warp_versions() and more == 1.0:
        known = table["predicted_ms"][algo][task]
        assert predicted(found, launches(task)) == pytest.approx(known, rel=PREDICTION, abs=2e-3)


@pytest.mark.parametrize(("task", "algo"), WATCHED)
def test_graphs_find_nothing_frozen(task: str, algo: str, cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fake storages have no addresses.
    monkeypatch.setattr(capture_watch, "storage_of", lambda tensor: tensor.untyped_storage()._cdata)
    trainer = fake.make_trainer(task, algo=algo)
    collector, choice = trainer.collector, GraphChoice("rollout", "test")
    graphs = collector.graphs = Graphs(choice, torch.device("cpu"), stateful=collector.graphs._stateful)
    fake._make_optimizer_state(trainer.algorithm)
    for _ in range(WARM_UP):
        collector.collect()
        collector.update()
    assert graphs.choice == choice and graphs._watches.keys() == {"rollout", "update"}


TASKS = [pytest.param(task, marks=() if task == "Ant" else pytest.mark.slow) for task in tasks()]


@pytest.mark.parametrize("task", TASKS)
def test_physics_launches_recorded_kernel_counts(task: str) -> None:
    table = json.loads(TABLE.read_text())
    more = 1.0 if table["warp"] == warp_versions() else OTHER_WARP
    assert complaints(table["launches"].get(task, {}), task, launches(task).numbers, more) == []


def complaints(known: dict[str, int], task: str, kernels: dict[str, int], more: float = 1.0) -> list[str]:
    """Return differences from the table: more than `more` times its numbers, or fewer with the same versions."""
    found = []
    for part in dict.fromkeys([*known, *kernels]):
        now, before = kernels.get(part, 0), known.get(part, 0)
        if now > before * more:
            found.append(f"{task}, {part}: {now} kernels, above the {before} of {TABLE.name}{UPDATE_TABLE}")
        elif more == 1.0 and now < before:
            found.append(f"{task}, {part}: {now} kernels, fewer than the {before} of {TABLE.name}{UPDATE_TABLE}")
    return found


def test_kernel_table_covers_exactly_all_trainings() -> None:
    table = json.loads(TABLE.read_text())
    everything = {algo: tasks_of(algo) for algo in ALGORITHMS}
    for numbers in (table["kernels"], table["predicted_ms"], table["megabytes"]):
        assert {algo: list(numbers[algo]) for algo in numbers} == everything
    assert list(table["launches"]) == list(tasks())


def test_update_kernels_are_extrapolated_from_steps() -> None:
    epochs, minibatches = 3, 2

    def changed(task: str, **settings: Any) -> Any:
        return prepare(task, **settings, ppo={"epochs": epochs, "minibatch_size": 512 * 16 // minibatches})

    prepare = fake.prepare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake, "prepare", lambda task, **it: (prepare if "num_envs" in it else changed)(task, **it))
        expected = fake.count("Cartpole", "ppo").kernels["update"]
    with fake_cuda():
        samples = fake.NUM_ENVS * 16
        trainer = fake.make_trainer("Cartpole", ppo={"epochs": epochs, "minibatch_size": samples // minibatches})
        kernels = iterate(trainer).kernels
    assert kernels["minibatch step"] + kernels["update"] == expected


def test_changed_kernel_counts_name_the_update_command() -> None:
    known = {"act": 40, "env": 100}
    assert complaints(known, "Ant", known) == []
    (more,) = complaints(known, "Ant", {"act": 41, "env": 100})
    assert more.startswith("Ant, act: 41 ") and "count_kernels.py" in more
    (fewer,) = complaints(known, "Ant", {"act": 40, "env": 99})
    assert fewer.startswith("Ant, env: 99 ")
    assert complaints(known, "Ant", {"act": 39, "env": 102}, OTHER_VERSION) == []
    assert complaints(known, "Ant", {"act": 40, "env": 103}, OTHER_VERSION) != []


BUDGETS = {"Ant": 120, "AnymalTerrain": 300, "Go1Tracking": 250, "Go1Velocity": 207, "ShadowHand": 200}
"""Kernels of a control step with PPO, without Warp's."""
MINIBATCH_STEP = 100
"""Kernels of a minibatch step with PPO."""
ROBOTS = ("Go1Velocity", "Go2Velocity", "G1Velocity", "T1Velocity", "Go1Tracking", "G1Tracking", "HumanoidTracking")
LARGER_STEPS = {"ShadowHand": 101, "AnymalTerrain": 120, "Hopper": 108, "HumanoidAMP": 108, "Trifinger": 129}
LARGER_STEPS |= {**dict.fromkeys(ROBOTS, 121), "CartpoleCamera": 173, "FrankaReachCamera": 173}
"""Minibatch steps with four layers, separate networks or an encoder."""


def test_steps_stay_within_kernel_budgets() -> None:
    kernels = json.loads(TABLE.read_text())["kernels"]["ppo"]
    assert [task for task, most in BUDGETS.items() if kernels[task]["control step"] > most] == []
    steps = {task: parts["minibatch step"] for task, parts in kernels.items()}
    assert {task: n for task, n in steps.items() if n > LARGER_STEPS.get(task, MINIBATCH_STEP)} == {}


def test_compiled_minibatch_step_stays_within_kernel_budget() -> None:
    table = json.loads((Path(__file__).parents[1] / "benchmarks" / "gpu" / "fused_kernels.json").read_text())
    compiled = {task: parts["minibatch_step"]["compiled"] for task, parts in table["tasks"].items()}
    assert {task: n for task, n in compiled.items() if n > 61} == {"AnymalTerrain": 83, "Go1Velocity": 84}


def test_kernel_time_follows_bytes_and_flops() -> None:
    rows, weights = cost_of([(COUNTED_ENVS, 4 * COUNTED_ENVS)]), cost_of([(100, 400)], flops=10**9)
    assert rows.seconds(1.0) == H100.kernel_s
    assert rows.seconds(1e6) == pytest.approx(4e6 * COUNTED_ENVS / H100.bandwidth)
    assert weights.seconds(1.0) == weights.seconds(1e6) == pytest.approx(1e9 / H100.fp32)
    products = cost_of([(COUNTED_ENVS, 4)], flops=10**9, bf16=True)
    assert products.seconds(10.0) == pytest.approx(1e10 / H100.bf16)


# Other settings


SMALL = {"horizon": 4, "epochs": 1, "minibatch_size": 16, "network": {"hidden": [16, 16], "rnn_size": 8}}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {
        "precision": "fp32",
        "normalize_obs": False,
        "normalize_value": False,
        "normalize_advantage": False,
        "value_clip": False,
        "max_grad_norm": None,
        "schedule": "constant",
        "entropy_coef": 0.01,
    },
    "separate": {"network": {"rnn": "gru", "separate": True, "state_dependent_std": True}, "schedule": "linear"},
    "lstm": {"network": {"rnn": "lstm", "rnn_layers": 2}, "sequence_length": 2, "schedule_per": "epoch", "epochs": 2},
}


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
@pytest.mark.parametrize("variant", VARIANTS)
def test_ppo_settings_stay_on_device(variant: str, cuda: None) -> None:
    changes = VARIANTS[variant]
    settings = {**SMALL, **changes, "network": {**SMALL["network"], **changes.get("network", {})}}
    trainer = fake.make_trainer("Cartpole", ppo=settings)
    assert iterate(trainer, steps=4).faults == []
    policy = trainer.algorithm.policy
    assert bool(policy.reduced) == (variant != "plain")
    assert all(parameter.grad is not None and parameter.grad.device == CUDA for parameter in policy.parameters())


MIRRORED = {"augment": True, "mirror_loss": 0.5}


def test_cameras_stay_on_device(cuda: None) -> None:
    pictures = {name: draw(0.0, 0.1, "additive") for name in PICTURES}
    settings = {"randomize": True, "randomization_params": {"picture_params": pictures}}
    settings |= {"observations": {"camera": {"shift": 2, "brightness": [0.8, 1.2]}}}
    assert iterate(fake.make_trainer("CartpoleCamera", task=settings, ppo=SMALL), steps=4).faults == []


@pytest.mark.usefixtures("watched")
def test_depth_vision_stays_on_device(cuda: None) -> None:
    trainer = fake.make_trainer("Go1Velocity", task={"vision": "depth"}, ppo={**SMALL, "symmetry": MIRRORED})
    assert iterate(trainer, steps=4).faults == []


def test_extensions_stay_on_device(cuda: None) -> None:
    rnd = {"weight": 1.0, "schedule": "linear", "end": 100, "normalize": True}
    more = {"rnd": rnd, "teacher": {"run": "another", "weight": 1.0, "end": 100}, "symmetry": MIRRORED}
    assert iterate(fake.make_trainer("Anymal", ppo={**SMALL, **more}), steps=4).faults == []


OFF_POLICY: dict[str, tuple[str, dict[str, Any]]] = {
    "rainbow": ("dqn", {"network": C51, "n_step": 3, "replay": {"alpha": 0.5, "storage": "bf16"}}),
    "plain dqn": ("dqn", {"double": False, "epsilon_ladder": 7.0, "network": {"dueling": False, "layer_norm": True}}),
    "fast td3": ("td3", {"network": C51, "clipped": False, "max_grad_norm": 1.0}),
    "prioritised sac from images": (
        "sac",
        {"n_step": 3, "replay": {"alpha": 0.6}, "network": {"encoder": {"frames": 3}}},
    ),
}


@pytest.mark.parametrize("variant", OFF_POLICY)
def test_off_policy_settings_stay_on_device(variant: str, cuda: None) -> None:
    algo, changes = OFF_POLICY[variant]
    task = {"task": {"_target_": "helpers.painted.Painted"}} if "images" in variant else {}
    trainer = fake.make_trainer("Cartpole", algo=algo, **task, **{algo: settings_of(algo, changes)})
    faults = iterate(trainer, steps=4).faults
    if changes.get("replay", {}).get("alpha"):  # such a run rejects torch_deterministic=true
        faults = [fault for fault in faults if "not deterministic: cumsum" not in fault]
    assert faults == []


@pytest.mark.parametrize(
    ("algo", "space", "images"),
    [
        ("ppo", Box(3), {}),
        ("ppo", MultiDiscrete((2,)), {"eye": (40, 32, 3)}),
        ("sac", Box(3), {"eye": (40, 32, 3)}),
        ("dqn", MultiDiscrete((2,)), {}),
    ],
    ids=str,
)
def test_envs_on_host_cost_one_copy_each_way_per_step(algo: str, space: ActionSpace, images: dict, cuda: None) -> None:
    small, envs = SMALL if algo == "ppo" else settings_of(algo), fake.HostEnvs(space, images=images)
    trainer = fake.make_trainer("Gymnasium", envs=envs, algo=algo, **{algo: small})
    with Placement() as placement:
        trainer.collector.collect(lambda text: None)
        trainer.collector.update()
    found = Counter((it.where.partition(":")[0], it.what) for it in placement.found if "random_env" not in it.where)
    upload = [("gpusim_rl/env/environment.py", what) for what in ("host tensor: empty", "host tensor: cat", "_to_copy")]
    assert found == dict.fromkeys([("gpusim_rl/run/collector.py", "_to_copy"), *upload], trainer.algorithm.horizon)


def test_log_row_is_the_only_copy_to_host(cuda: None) -> None:
    trainer = fake.make_trainer("Cartpole", ppo=SMALL)
    iterate(trainer)
    trainer.iteration = trainer.cfg.log.interval
    with Placement() as placement:
        trainer._reporter._rows_of_interval(trainer.view())
    assert [location.what for location in placement.found] == ["host tensor: empty", "copy_"], placement.locations
    assert all(location.where.startswith("gpusim_rl/run/metrics.py:") for location in placement.found)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_device_check_accepts_every_algorithm(algo: str, cuda: None) -> None:
    trainer = fake.make_trainer("HumanoidAMP" if algo == "amp" else "Anymal", algo=algo)
    check_devices("the environment", trainer.env, CUDA)
    check_devices("the algorithm", trainer.algorithm, CUDA)


def draw(low: float, high: float, operation: str = "scaling", distribution: str = "uniform", **more: Any) -> dict:
    return {"range": [low, high], "operation": operation, "distribution": distribution, **more}


NOISE = draw(0.0, 0.02, "additive", "gaussian", range_correlated=[0.0, 0.05], schedule="linear", schedule_steps=30)
EVERYTHING: dict[str, dict[str, Any]] = {
    "Ant": {
        "frequency": 8,
        "observations": NOISE,
        "actions": {**NOISE, "distribution": "uniform", "schedule": "constant"},
        "latency": {"range": [0, 3]},
        "sim_params": {"gravity": draw(0.0, 0.4, "additive", "gaussian")},
        "actor_params": {
            "ant": {
                "pushes": {"interval_s": [0.1, 0.2], "velocity": [0.0, 0.5]},
                "dof_properties": {
                    **dict.fromkeys(("effort", "armature"), draw(0.9, 1.1)),
                    **dict.fromkeys(("stiffness", "friction"), draw(0.0, 0.1, "additive")),
                    **dict.fromkeys(("lower", "upper"), draw(0.0, 0.01, "additive", "gaussian")),
                    "damping": draw(0.5, 1.5, interval_s=0.14),
                },
                "rigid_body_properties": {
                    "mass": draw(0.5, 1.5),
                    "inertia": draw(0.8, 1.2, interval_s=0.2),
                    "com": draw(-0.02, 0.02, "additive"),
                },
                "rigid_shape_properties": {
                    **dict.fromkeys(("torsion_friction", "rolling_friction", "color"), draw(0.7, 1.3)),
                    "friction": draw(0.7, 1.3, distribution="loguniform"),
                },
            },
            "ground": {"rigid_shape_properties": {"friction": draw(0.7, 1.3)}},
        },
    },
    "ShadowHand": {
        "actor_params": {
            "hand": {"tendon_properties": {"stiffness": draw(0.7, 1.3), "damping": draw(0.3, 3.0)}},
            "object": {"pushes": {"interval_s": [0.1, 0.3], "force": [0.0, 2.0], "duration_s": 0.06}},
        }
    },
}


@pytest.mark.parametrize("task", EVERYTHING)
def test_randomization_stays_on_device(task: str, cuda: None) -> None:
    settings = {"randomize": True, "randomization_params": EVERYTHING[task]}
    assert iterate(fake.make_trainer(task, task=settings, ppo=SMALL)).faults == []


def test_every_randomizable_property_is_covered() -> None:
    actors = [actor for params in EVERYTHING.values() for actor in params["actor_params"].values()]
    covered = {(section, name) for actor in actors for section in SECTIONS for name in actor.get(section, {})}
    covered.add(("dof_properties", "delay"))  # no task has delays; written like the others
    assert covered == {(section, name) for section, properties in SECTIONS.items() for name in properties}


# Detection of faults


@dataclass
class Operands:
    """Tensors for the calls below."""

    x: Tensor = field(default_factory=lambda: torch.zeros(6, 4, device=CUDA))
    square: Tensor = field(default_factory=lambda: torch.zeros(4, 4, device=CUDA))
    mask: Tensor = field(default_factory=lambda: torch.zeros(6, dtype=torch.bool, device=CUDA))
    index: Tensor = field(default_factory=lambda: torch.zeros(6, dtype=torch.int64, device=CUDA))


FAULTS: dict[str, tuple[str, Callable[[Operands], object]]] = {
    "item": ("item", lambda it: it.x[0, 0].item()),
    "float": ("_local_scalar_dense", lambda it: float(it.x[0, 0])),
    "if": ("_local_scalar_dense", lambda it: bool(it.mask.any())),
    "cpu": ("cpu", lambda it: it.x.cpu()),
    "numpy": ("numpy", lambda it: it.x.numpy()),
    "nonzero": ("nonzero", lambda it: it.mask.nonzero()),
    "mask as an index": ("index", lambda it: it.x[it.mask]),
    "repeats without a length": ("repeat_interleave", lambda it: it.x.repeat_interleave(it.index, dim=0)),
    "a new number": ("tensor", lambda it: torch.tensor(1.0, device=CUDA)),
    "an index of the host": ("host tensor", lambda it: it.x[torch.arange(3)]),
    "a factory without a device": ("host tensor: zeros", lambda it: torch.zeros(4)),
    "a tensor to the device": ("_to_copy", lambda it: torch.zeros(4).to(CUDA)),
    "a copy into the host": ("copy_", lambda it: torch.zeros(6, 4).copy_(it.x)),
    "a number of the host": ("host tensor: mul", lambda it: it.x * torch.ones(())),
    "solve": ("linear algebra", lambda it: torch.linalg.solve(it.square, it.x.T)),
    "cumulative sum": ("not deterministic: cumsum", lambda it: it.x.cumsum(0)),
    "histogram": ("histc", lambda it: torch.histc(it.x, 4)),
    "format": ("__format__", lambda it: f"{it.x[0, 0]:.2f}"),
    "multinomial": ("linear algebra: multinomial", lambda it: torch.multinomial(it.square, 1)),
}
HARMLESS: dict[str, tuple[int, Callable[[Operands], object]]] = {
    "a view": (0, lambda it: it.x[:, 1:].unsqueeze(0).expand(3, 6, 3).detach()),
    "a number in where": (2, lambda it: torch.where(it.mask, 1.0, it.x.T)),  # filled into a tensor
    "a number in a sum": (1, lambda it: it.x + 1.0),
    "a mask that fills": (1, lambda it: it.x.masked_fill_(it.mask[:, None], 0.0)),
    "a norm": (1, lambda it: torch.linalg.vector_norm(it.x, dim=1)),
    "a cross product": (1, lambda it: torch.linalg.cross(it.x[:, :3], it.x[:, 1:])),
    "a product of matrices": (1, lambda it: it.x @ it.x.T),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_placement_detects_fault(fault: str, cuda: None) -> None:
    kind, call = FAULTS[fault]
    given = Operands()
    rejected = DataDependentOutputException, DynamicOutputShapeException, RuntimeError, TypeError
    with Placement() as placement, suppress(*rejected):  # fake tensors reject reads of values after they are counted
        call(given)
    assert any(location.what.startswith(kind) for location in placement.found), placement.locations
    assert all(location.where.startswith("tests/test_placement.py:") for location in placement.found)


@pytest.mark.parametrize("what", HARMLESS)
def test_placement_accepts_device_work(what: str, cuda: None) -> None:
    kernels, call = HARMLESS[what]
    given = Operands()
    with Placement() as placement:
        call(given)
    assert placement.locations == []
    assert sum(work.kernels for work in placement.work.values()) == kernels


PLACES: dict[str, Callable[[Any], tuple[object, str]]] = {
    "act": lambda it: (it.algorithm.policy, "sample"),
    "action": lambda it: (it.env.task, "apply_action"),
    "physics": lambda it: (it.env.sim, "refresh"),
    "rewards": lambda it: (it.env.task, "rewards"),
    "observe": lambda it: (it.env.task, "observe"),
    "reset": lambda it: (it.env.task, "reset"),
    "randomize": lambda it: (it.env.randomizer, "begin_episodes"),
    "nan guard": lambda it: (it.env.nan_guard, "after_step"),
    "env": lambda it: (vec_env, "is_image"),
    "record": lambda it: (it.algorithm.rollout, "write"),
    "metrics": lambda it: (it.collector.metrics, "record_step"),
    "rollout": lambda it: (it.collector.metrics.episodes, "record"),
    "minibatch step": lambda it: (it.algorithm.policy.head, "clamp_"),
    "update": lambda it: (it.algorithm.policy, "update_value_norm"),
}


def test_placement_detects_fault_in_every_part_of_an_iteration(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"randomize": True, "randomization_params": {"observations": NOISE}}
    trainer = fake.make_trainer("Cartpole", task=settings, ppo=SMALL)

    def plant(call: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            torch.ones(3)
            return call(*args, **kwargs)

        return faulty

    for place in PLACES.values():
        owner, name = place(trainer)
        monkeypatch.setattr(owner, name, plant(getattr(owner, name)))
    found = iterate(trainer).found
    assert {location.what for location in found} == {"host tensor: ones"}
    assert {location.phase for location in found} == PLACES.keys() == PARTS.keys()


@pytest.mark.parametrize("after", [0, 2])  # during construction, and in a step
def test_line_that_reads_a_value_is_reported(after: int, cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards, calls = Cartpole.rewards, 0

    def reading(task: Cartpole) -> dict[str, Tensor]:
        nonlocal calls
        calls += 1
        if calls > after and bool((task.progress > 3).any()):
            task.progress.zero_()
        return rewards(task)

    monkeypatch.setattr(Cartpole, "rewards", reading)
    with pytest.raises(AssertionError, match=r"^a value is read: aten.* at tests/test_placement.py:\d+$"):
        iterate(fake.make_trainer("Cartpole", ppo=SMALL))


# Replacements of torch


@pytest.mark.parametrize("network", [{}, {"rnn": "gru", "separate": True, "state_dependent_std": True}], ids=str)
def test_python_backward_equals_torch(network: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    it = Learner(RandomEnv(8), ppo_config(network, minibatch_size=32))
    it.collect()
    compared = 0
    engine = torch.autograd.graph._engine_run_backward

    def both(*given: Any, **options: bool) -> tuple[Tensor | None, ...]:
        nonlocal compared
        ours, theirs = backward(*given, **options), engine(*given, **options)
        for mine, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, wanted)
            compared += 1
        return theirs

    monkeypatch.setattr("gpusim_rl.learn.optimizer._engine_run_backward", both)
    it.update()
    assert compared > 8


def test_autocast_works_on_fake_cuda(cuda: None) -> None:
    layer, x = torch.zeros(3, 4, device=CUDA), torch.zeros(6, 4, device=CUDA)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert nn.functional.linear(x, layer).dtype == torch.bfloat16
