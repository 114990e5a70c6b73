"""Demonstrations: transitions in a file, which a script or another policy has made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gpusim_rl.errors import ConfigError
from gpusim_rl.files import checkpoint_file
from gpusim_rl.learn.algorithm import EnvSpec, Observation, Transition
from gpusim_rl.learn.replay import Replay
from gpusim_rl.spaces import ActionSpace, Box


class _ActionLimits(Protocol):
    @property
    def clip_actions(self) -> float: ...


class _Environments(Protocol):
    """The part of `gpusim_rl.env.VecEnv` that is needed here: `learn` does not import `env`."""

    num_envs: int
    device: torch.device
    obs_sizes: dict[str, int]

    @property
    def cfg(self) -> _ActionLimits: ...
    @property
    def action_space(self) -> ActionSpace: ...
    @property
    def steps_between_truncations(self) -> int: ...
    def reset(self) -> dict[str, Tensor]: ...
    def step(self, action: Tensor) -> Transition: ...


@torch.no_grad()
def record(env: _Environments, policy: Callable[[Observation], Tensor], file: str | Path, *, steps: int) -> None:
    """Writes what a policy does into a file of demonstrations.

        record(gpusim_rl.make_env("Cartpole", num_envs=16), push, "demonstrations.pt", steps=500)

    The file is data, as a checkpoint is (docs/security.md). It does not depend on the number of envs of a training.

    Args:
        env: A `VecEnv`. New episodes begin in all of them.
        policy: Function that returns actions [num_envs, actions], within what the envs take, for raw observations by
            group, [num_envs, size] each.
        file: File to write.
        steps: Control steps in each env.

    Raises:
        ConfigError: An observation, an action or a reward is not finite.
        OSError: The file cannot be written.
    """
    obs = {group: value.clone() for group, value in env.reset().items()}
    episode = env.steps_between_truncations
    spec = EnvSpec(env.num_envs, env.obs_sizes, env.action_space, episode)
    memory = Replay(steps, spec, obs, n_step=0, gamma=1.0, storage=torch.float32, device=env.device)
    finite, limit = torch.ones((), dtype=torch.bool, device=env.device), env.cfg.clip_actions
    for _ in range(steps):
        action = policy(obs)
        finite &= action.isfinite().all()
        step = env.step(action)
        memory.write(obs, action.clamp(-limit, limit) if isinstance(env.action_space, Box) else action, step)
        for group, value in step.obs.items():
            obs[group].copy_(value)
    if not finite:  # a memory keeps 0 in place of such an action
        raise ConfigError("the demonstrations have a number that is not finite in action")
    state = memory.state_dict()
    _check_finite(state, "the demonstrations have")
    checkpoint_file.save(Path(file), {"demonstrations": {"episode": episode, "memory": state}})


def load(
    file: str, env: EnvSpec, groups: Sequence[str], *, n_step: int, gamma: float, device: torch.device
) -> tuple[Replay, str]:
    """Makes a `Replay` of a file that `record` wrote, for the environments of a training; returns its digest too.

    Raises:
        ConfigError: The file is not there, damaged, or not of demonstrations, or they do not fit the environments.
    """
    content, digest = checkpoint_file.load_with_digest(Path(file))
    match content.get("demonstrations"):
        case {"episode": int(episode), "memory": {"reward": Tensor(shape=(steps, envs))} as state} if (
            min(episode, steps, envs) > 0
        ):
            pass
        case _:
            advice = "Try one that gpusim_rl.learn.demonstrations.record wrote"
            raise ConfigError(f"{file} holds no demonstrations. {advice}")
    if steps <= n_step:
        raise ConfigError(f"{file} has {steps} control steps of each env, and n_step={n_step} needs more")
    spec = EnvSpec(envs, env.obs_sizes, env.action_space, episode)
    replay = Replay(steps, spec, groups, n_step=n_step, gamma=gamma, storage=torch.float32, device=device)
    replay.total.fill_(steps)
    _check_fits(file, state, replay.state_dict() if device.type != "meta" else {})
    _check_finite(state, f"{file} has")
    replay.load_state_dict(state)
    return replay, digest


def _check_fits(file: str, state: Mapping[str, Any], expected: Mapping[str, Any], path: str = "") -> None:
    """Stops where a file, which may be from elsewhere, holds tensors of other shapes, or something else."""
    for name, ours in expected.items():
        theirs = state.get(name)
        if isinstance(ours, Mapping):
            _check_fits(file, theirs if isinstance(theirs, Mapping) else {}, ours, f"{path}{name} ")
        elif not isinstance(theirs, Tensor) or (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
            shape = list(theirs.shape) if isinstance(theirs, Tensor) else "nothing"
            raise ConfigError(
                f"{file}: the demonstrations do not fit the task: expected {path}{name} {list(ours.shape)}, got {shape}"
            )
        elif name == "total" and not torch.equal(theirs, ours.cpu()):
            raise ConfigError(f"{file}: the demonstrations count {int(theirs)} control steps and have {int(ours)}")


def _check_finite(state: Mapping[str, Any], where: str) -> None:
    for name in ("obs", "final_obs", "action", "reward"):
        tensors = state[name].values() if isinstance(state[name], Mapping) else [state[name]]
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            raise ConfigError(f"{where} a number that is not finite in {name}")
