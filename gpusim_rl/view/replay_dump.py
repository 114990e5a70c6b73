"""Replay of `diverged.pt` and `skipped.pt`: reproduce and describe a failure of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpusim_rl.api import load_spec
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.env import Environment, VecEnv
from gpusim_rl.env.nan_guard import put_state
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.checkpoint_file import load
from gpusim_rl.files.paths import Checkpoint
from gpusim_rl.run.checkpoint import DIVERGENCE, check_training, check_types, must_fit
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.settings.checks import check_settings
from gpusim_rl.settings.discover import import_from_current_folder
from gpusim_rl.settings.simulators import SIMULATORS
from gpusim_rl.settings.trust import check_saved_settings
from gpusim_rl.view.player import whole_episodes


class DumpReplay:
    """Step-by-step replay of a dump, with the interface that viewers expect of a `Player`."""

    def __init__(self, env: Environment, title: str, lines: Iterator[str]) -> None:
        self.env, self.title, self._lines = env, title, lines

    @classmethod
    def open(
        cls, file: Path, sim: str | None = None, *, trust: bool = False, config_dir: str | None = None
    ) -> DumpReplay:
        """Restore the envs from `diverged.pt`, `skipped.pt` or a checkpoint, or raise ConfigError.

        Without `sim`, a divergence is replayed on the registry's `replay_sim`, and an update on the run's simulator.
        `trust` allows importing any class in the file's settings; `config_dir` is the trusted folder of `-cd`.
        """
        import_from_current_folder()
        state = load(file)
        if {"config", "state", "action", "env"} <= state.keys():
            check_types(state, DIVERGENCE, DIVERGENCE, f"{file} is not a divergence dump")
            make = cls._divergence
        elif {"config", "policy", "algorithm"} <= state.keys():
            check_training(state, file, ("config", "overrides", "iteration", "task", "sim"))
            make = cls._update
        else:
            raise ConfigError("neither a dump nor a checkpoint", key=str(file), hint="Try a run's diverged.pt")
        state["config"] = check_saved_settings(state["config"], file, trust=trust, config_dir=config_dir)
        check_settings(state["config"])
        return make(file, state, sim)

    @classmethod
    def _divergence(cls, file: Path, state: Mapping[str, Any], sim: str | None) -> DumpReplay:
        state["config"]["task"]["randomize"] = False
        spec = load_spec(state["config"], [], Checkpoint(file, None))
        env = whole_episodes(spec, sim or SIMULATORS[state["sim"]].replay_sim, 1, seed=0, on="cpu")
        env.reset()
        with must_fit(file, f"task {env.name}"):
            put_state(env.sim, state["state"])
            if not (state["action"].is_floating_point() and state["action"].shape == (env.num_actions,)):
                raise ValueError(f"expected an action of {env.num_actions} numbers")
        when = f"control step {state['episode_step']} of its episode, iteration {state['iteration']}"
        title = f"{file}: env {state['env']}, {when}, {state['task']} on {state['sim']} (here {env.sim.name})"
        return cls(env, title, _physics_steps(env, state))

    @classmethod
    def _update(cls, file: Path, state: Mapping[str, Any], sim: str | None) -> DumpReplay:
        config = dict(state["config"])
        if not torch.cuda.is_available():
            config |= {"device": "cpu", "sim_device": None, "rl_device": None}
        config |= {"checkpoint": str(file), "test": False, "log": {**config["log"], "tensorboard": False}}
        config["sim"] = {**config["sim"], "name": sim or config["sim"]["name"]}
        trainer = make_trainer(load_spec(config, state["overrides"], Checkpoint(file, None)))
        note = "" if trainer.start.sim.name == state["sim"] else f", in new episodes on {trainer.start.sim.name}"
        title = f"{file}: the iteration after iteration {state['iteration']}, {state['task']} on {state['sim']}{note}"
        return cls(trainer.env, title, _iteration(trainer))

    def step(self) -> str | None:
        """Perform the next step; return its description, or None after the last one."""
        with torch.no_grad():
            return next(self._lines, None)

    def close(self) -> None:
        """Close the simulator."""
        self.env.close()


def _physics_steps(env: VecEnv, dump: Mapping[str, Any]) -> Iterator[str]:
    task, sim, action = env.task, env.sim, dump["action"].to(env.device)[None]
    yield f"action: {_describe('action', action, ('', 'column'))}"
    env.put_action(action.to(task.actions.dtype))
    task.apply_action(task.actions)
    if sim.bad_inputs.any():
        yield f"{env.name}.apply_action(): a control or a force is NaN or infinite"
    for number in range(1, env.cfg.decimation + 1):
        sim.step(1)
        keys = [(name, key) for name, values in dump["state"].items() for key in values]
        states = [_describe(f"{n}.{k}", getattr(sim.articulation(n), k), ("", "column")) for n, k in keys]
        yield f"physics step {number} of {env.cfg.decimation}: {', '.join(states)}"
        if sim.diverged.any():
            yield "diverged"
            return
    for name, term in task.rewards().items():
        yield f"reward: {_describe(name, term, ('',))}"
    for group, value in env.clean_obs().items():
        yield f"observation: {_describe(group, value, ('', 'column'))}"
    bad = bool(sim.bad_inputs.any()) or not bool(action.isfinite().all())
    yield "counts as diverged because of the action" if bad else f"did not diverge on {sim.name}"


def _iteration(trainer: Trainer) -> Iterator[str]:
    algorithm, obs = trainer.algorithm, trainer.collector.obs
    algorithm.begin_rollout()
    for number in range(1, algorithm.horizon + 1):
        action, step = trainer.collector.control_step()
        algorithm.record(action, step)
        numbers = [_describe(f"observation {group}", value, ("env", "column")) for group, value in obs.items()]
        numbers += [_describe("action", action, ("env", "column")), _describe("reward", step.reward, ("env",))]
        for group, value in step.obs.items():
            obs[group].copy_(value)
        count = int(step.diverged.sum())
        yield f"step {number} of {algorithm.horizon}: {', '.join(numbers)}{f', {count} envs diverged' if count else ''}"
    with torch.enable_grad():
        algorithm.before_update()
        stats = algorithm.update()
    parameters = dict(algorithm.policy.named_parameters())
    bad = [name for name, value in parameters.items() if value.grad is not None and not value.grad.isfinite().all()]
    if stats.get("check/learned", torch.ones(())):
        yield "update: the policy learned"
        return
    tensors = f"in the last one, {len(bad)} of {len(parameters)} gradients are not finite: {', '.join(bad)}"
    yield f"update: no minibatch had a finite gradient; {tensors if bad else 'the last gradient norm overflows'}"


def _describe(name: str, value: Tensor, axes: tuple[str, ...]) -> str:
    """Describe the largest magnitude of a tensor (NaN first) and its index."""
    if not value.numel():
        return f"{name} is empty"
    index = torch.unravel_index(value.abs().argmax(), value.shape)
    where = [f"{axis} {int(number)}" for axis, number in zip(axes, index, strict=True) if axis]
    return f"{name} up to {float(value[index]):.3g}" + (f" ({', '.join(where)})" if where else "")
