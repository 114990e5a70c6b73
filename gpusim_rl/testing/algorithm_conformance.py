"""Conformance suite for algorithms; subclass it in your package's tests.

    from gpusim_rl.testing.algorithm_conformance import AlgorithmConformance


    class TestMyAlgorithms(AlgorithmConformance):
        config_dir = "my_cfg"

pytest then runs every check on every algorithm of `my_cfg/algo`, over random envs that need no simulator.
"""

# ruff: noqa: D102  # checks are documented by their names

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from gpusim_rl.learn.algorithm import Algorithm, EnvSpec, LearnerContext, load_algorithm_class
from gpusim_rl.run.cuda_graph import WARM_UP, GraphChoice
from gpusim_rl.run.held_objects import generators_of
from gpusim_rl.settings.checks import algorithm_settings_class, build
from gpusim_rl.settings.compose import compose
from gpusim_rl.settings.schema import ALGORITHMS
from gpusim_rl.spaces import ActionSpace, Box
from gpusim_rl.testing.conformance import cloned, copied, differences, leaves, merged
from gpusim_rl.testing.random_env import RandomEnv
from gpusim_rl.testing.recorded_graphs import RecordedGraphs
from gpusim_rl.testing.sync_counter import SyncCounter


class Training:
    """Training loop over random envs, like the trainer's; `mode` is the mode of the emulated CUDA graphs."""

    def __init__(self, algorithm: Algorithm, env: RandomEnv, mode: str = "off") -> None:
        self.algorithm, self.env, self.obs, cpu = algorithm, env, env.reset(), torch.device("cpu")
        generators = generators_of([algorithm, env], cpu)
        choice = GraphChoice(mode, "conformance")
        self.graphs = RecordedGraphs(choice, cpu, generators=generators, stateful=[algorithm])

    def iterate(self) -> dict[str, Tensor]:
        """Run a rollout and an update; return the update's statistics."""
        self.graphs.run("rollout", self._rollout)
        self.algorithm.before_update()
        return self.graphs.run("update", self.algorithm.update)

    def _rollout(self) -> None:
        self.algorithm.begin_rollout()
        for _ in range(self.algorithm.horizon):
            action, step = self.graphs.run("step", self._control_step)
            self.algorithm.record(action, step)
            for group, value in self.obs.items():
                value.copy_(step.obs[group])

    def _control_step(self) -> tuple[Tensor, Any]:
        action = self.algorithm.act(self.obs)
        return action, self.env.step(action)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next iteration depends on."""
        streams = {"env": self.env.generator.get_state(), "torch": torch.get_rng_state()}
        learned = {"policy": self.algorithm.policy.state_dict(), "algorithm": self.algorithm.state_dict()}
        return {**learned, "obs": self.obs, "streams": streams}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, in place."""
        self.algorithm.policy.load_state_dict(state["policy"])
        self.algorithm.load_state_dict(state["algorithm"])
        for group, value in self.obs.items():
            value.copy_(state["obs"][group])
        self.env.generator.set_state(state["streams"]["env"])
        torch.set_rng_state(state["streams"]["torch"])


class AlgorithmConformance:
    """Checks of algorithms, collected from subclasses named `Test...`; `test_... = None` disables one.

    Attributes:
        config_dir: Folder with `algo/<name>.yaml`, as for `-cd`; None for the built-in algorithms.
        algorithms: Names to check; None for all of `config_dir`.
        settings: Overrides by algorithm, such as small networks and an early start of learning.
        obs_sizes: Observation sizes by group.
    """

    config_dir: ClassVar[str | Path | None] = None
    algorithms: ClassVar[Sequence[str] | None] = None
    settings: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    obs_sizes: ClassVar[Mapping[str, int]] = {"policy": 5, "critic": 7}
    action_space: ClassVar[ActionSpace] = Box(3)

    @classmethod
    def names(cls) -> Sequence[str]:
        """Return the names of the algorithms to check."""
        if cls.algorithms is not None or cls.config_dir is None:
            return cls.algorithms or list(ALGORITHMS)
        return sorted(file.stem for file in Path(cls.config_dir, "algo").glob("*.yaml"))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise checks by algorithm name."""
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", self.names())

    def make_algorithm(self, name: str, device: str = "cpu") -> tuple[Algorithm, RandomEnv]:
        """Build an algorithm and envs on "cpu" or "meta"."""
        composed = compose(["~task", f"algo={name}"], self.config_dir)
        section, cls = composed["algo"]["name"], load_algorithm_class(composed["algo"]["_target_"])
        values = merged(composed[section], self.settings.get(name, {}))
        cfg = build(algorithm_settings_class(section, cls), values, section)
        env = RandomEnv(8, self.obs_sizes, self.action_space.size, device=device)
        return make_algorithm(cls, cfg, env, self.action_space, LearnerContext(section)), env

    def training(self, name: str, mode: str = "off", device: str = "cpu") -> Training:
        """Build a training loop."""
        torch.manual_seed(0)
        return Training(*self.make_algorithm(name, device), mode)

    def test_iteration_has_no_host_sync(self, name: str) -> None:
        it = self.training(name)
        it.iterate()  # one-off work
        with SyncCounter() as syncs:
            it.env.step = syncs.pause()(it.env.step)
            it.iterate()
        assert syncs.total == 0, syncs.locations

    def test_iteration_runs_on_meta_tensors(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        it, kinds = self.training(name, device="meta"), [torch.optim.Optimizer]
        for kind in kinds:  # unfused optimisers read their step counter on the host
            kinds += kind.__subclasses__()
            monkeypatch.setattr(kind, "step", lambda *_: None)
        stats = it.iterate()
        assert {key: value.device.type for key, value in stats.items() if value.device.type != "meta"} == {}

    def test_training_stays_finite_and_learns(self, name: str) -> None:
        it = self.training(name)
        before = cloned(it.algorithm.policy.state_dict())
        stats = [it.iterate() for _ in range(6)]
        assert [key for row in stats for key, value in row.items() if value.ndim or not value.isfinite()] == []
        after = it.algorithm.policy.state_dict()
        assert [key for key, value in leaves(after) if not value.isfinite().all()] == []
        assert differences(before, after), "nothing learned in 6 iterations; set an earlier start in `settings`"

    def test_graph_replay_equals_eager_run(self, name: str) -> None:
        ends = {}
        for mode in ("off", "rollout", "step"):
            it = self.training(name, mode)
            states = [cloned(it.state_dict()) for _ in range(WARM_UP + 2) if it.iterate() is not None]
            it.load_state_dict(states[1])
            it.iterate()
            ends[mode] = [states, it.state_dict()]
            assert it.graphs.choice.mode == mode, it.graphs.choice  # shows the reason
            assert differences(ends["off"], ends[mode]) == [], mode

    def test_resume_is_bit_identical(self, name: str) -> None:
        one, other = self.training(name), self.training(name)
        stats = [one.iterate() for _ in range(3)][-1]
        kept, state = cloned(stats), copied(one.state_dict())
        expected = cloned([one.iterate(), one.iterate(), one.state_dict()])
        other.load_state_dict(state)
        assert differences(other.state_dict(), state) == []
        assert differences([other.iterate(), other.iterate(), other.state_dict()], expected) == []
        assert differences(stats, kept) == [], "statistics overwritten by a later update"

    def test_state_dict_is_plain_data_of_minimal_size(self, name: str) -> None:
        it = self.training(name)
        it.iterate()
        state = it.algorithm.state_dict()
        assert differences(copied(state), state) == []
        tensors = [value for _, value in leaves(state) if isinstance(value, Tensor)]
        memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        assert sum(memory.values()) <= sum(x.nbytes for x in tensors), "a view of a larger tensor"


def make_algorithm(
    cls: type[Algorithm], cfg: Any, env: RandomEnv, action_space: ActionSpace, context: LearnerContext, **facts: Any
) -> Algorithm:
    """Build an algorithm for random envs; `facts` are other fields of the `EnvSpec`."""
    spec = EnvSpec(env.num_envs, env.obs_sizes, action_space, 1, images=env.images, **facts)
    return cls(cfg, spec, context, device=torch.device(env.device), seed=0, max_iterations=100)
