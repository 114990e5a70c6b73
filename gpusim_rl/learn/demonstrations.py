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


class ActionLimits(Protocol):
    """Settings of a task, as far as they limit actions: `gpusim_rl.env.TaskConfig`."""

    @property
    def clip_actions(self) -> float:
        """Largest absolute value of an action."""
        ...


class Environments(Protocol):
    """Environments that can be recorded: `gpusim_rl.env.VecEnv`."""

    num_envs: int
    device: torch.device
    obs_sizes: dict[str, int]

    @property
    def cfg(self) -> ActionLimits:
        """Settings of the task."""
        ...

    @property
    def action_space(self) -> ActionSpace:
        """Actions that `step` takes."""
        ...

    @property
    def steps_between_truncations(self) -> int:
        """Control steps in which an env is truncated once at most."""
        ...

    def reset(self) -> dict[str, Tensor]:
        """Begins an episode in every env; returns the observation to act on."""
        ...

    def step(self, action: Tensor) -> Transition:
        """Advances all envs by one control step."""
        ...


@torch.no_grad()
def record(env: Environments, policy: Callable[[Observation], Tensor], file: str | Path, *, steps: int) -> None:
    """Writes what a policy does into a file of demonstrations.

        record(gpusim_rl.make_env("Cartpole", num_envs=16), push, "demonstrations.pt", steps=500)

    The file is data, as a checkpoint is (docs/security.md). It does not depend on the number of envs of a training.

    Args:
        env: The environments. New episodes begin in all of them.
        policy: Gives actions [num_envs, actions], within what the envs take, for raw observations by group,
            [num_envs, size] each.
        file: Where to write.
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


def load(file: str, env: EnvSpec, groups: Sequence[str], *, n_step: int, gamma: float, device: torch.device) -> Replay:
    """The replay memory that a file of demonstrations holds.

    Args:
        file: What `record` wrote.
        env: The environments of the training.
        groups: Observation groups to keep.
        n_step: Steps in a window, at most.
        gamma: Discount per step.
        device: Where it lives.

    Raises:
        ConfigError: The file is not there, damaged, or not of demonstrations, or they do not fit the environments.
    """
    found = checkpoint_file.load(Path(file)).get("demonstrations")
    state = found.get("memory") if isinstance(found, Mapping) else None
    episode = found.get("episode") if isinstance(found, Mapping) else None
    reward = state.get("reward") if isinstance(state, Mapping) else None
    if (
        not isinstance(reward, Tensor)
        or reward.ndim != 2
        or not reward.numel()
        or type(episode) is not int
        or episode < 1
    ):
        raise ConfigError(f"{file} holds no demonstrations. Try one that gpusim_rl.learn.demonstrations.record wrote")
    assert isinstance(state, Mapping)
    steps, envs = reward.shape
    if steps <= n_step:
        raise ConfigError(f"{file} has {steps} control steps of each env, and n_step={n_step} needs more")
    spec = EnvSpec(envs, env.obs_sizes, env.action_space, episode)
    replay = Replay(steps, spec, groups, n_step=n_step, gamma=gamma, storage=torch.float32, device=device)
    replay.total.fill_(steps)
    _check_fits(file, state, replay.state_dict() if device.type != "meta" else {})
    _check_finite(state, f"{file} has")
    replay.load_state_dict(dict(state))
    return replay


def _check_fits(file: str, found: Mapping[str, Any], wanted: Mapping[str, Any], path: str = "") -> None:
    """A file from elsewhere may hold tensors of any shape, or something else."""
    for name, ours in wanted.items():
        theirs = found.get(name)
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
