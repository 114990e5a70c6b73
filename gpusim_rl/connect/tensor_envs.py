"""Base class for other libraries' torch-based vector envs, without host-device synchronisation."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from gpusim_rl.connect.library_config import LibraryConfig, refuse_unused, require_shape
from gpusim_rl.env.environment import Environment, Observation, Step
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.settings.schema import EnvConfig
from gpusim_rl.spaces import ActionSpace, Box, MultiDiscrete

Mask = Bool[Tensor, " envs"]
logger = logging.getLogger(__name__)


class TensorEnvs(Environment):
    """Vector env whose observations, rewards and termination flags are torch tensors.

    Attributes:
        groups: The library's observation group for each of our groups; `policy` is required.
        keeps_last_obs: Field of the library's configuration that preserves the true last observation, and its value.
        counts_ends: Whether the library logs counts of ended envs by reason (Isaac Lab logs fractions).
    """

    groups: ClassVar[Mapping[str, str]]
    keeps_last_obs: ClassVar[tuple[str, bool]]
    counts_ends: ClassVar[bool] = False
    Config: ClassVar[type] = LibraryConfig
    on_learners_device = True
    resumable = False

    def __init__(self, envs: Any, name: str = "") -> None:
        envs = envs.unwrapped
        name = name or type(envs).__name__
        field, value = self.keeps_last_obs
        if not hasattr(envs.cfg, field):
            problem = f"this version of {self.library} has no {field}, so final observations are lost"
            raise ConfigError(problem, key=name, hint="Try the version in docs/connect.md")
        setattr(envs.cfg, field, value)
        self.name, self._envs = name, envs
        self.device = torch.device(envs.device)
        self.num_envs = int(envs.num_envs)
        self.max_episode_length = int(envs.max_episode_length)
        self.steps_between_truncations = 1  # an env may truncate its episode at any step
        self.frames_per_s = 1.0 / float(envs.step_dt)
        self.summary = f"{name}, control {self.frames_per_s:.0f} Hz, episode {self.max_episode_length} steps at most"
        self.action_space, self._to_library = actions_of(envs.single_action_space, self.device, name)
        self.num_actions = self.action_space.size
        self._time_limit_ends = bool(envs.cfg.is_finite_horizon)  # treat time limits as terminations
        self._rewards = getattr(envs, "reward_manager", None)
        self._stat_names: list[str] = []
        self._stepped = False
        self._resetting = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self._not_finite = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

    @classmethod
    def adopt(cls, envs: Any, cfg: EnvConfig, *, seed: int) -> Environment:
        """Wrap envs from a user's script; they keep their seed."""
        refuse_unused(cfg, cls.library, {})
        return cls(envs)

    def reset(self) -> Observation:
        """Begin an episode in every env and return the observations; raise TaskError if they are not finite."""
        self._resetting.zero_()
        with self._in_order():
            library_obs, extras = self._envs.reset()
            obs = self._numbers(library_obs)
        self._take_names(extras)
        self.obs_sizes = {group: value.shape[1] for group, value in obs.items()}
        for group, value in obs.items():
            if not bool(value.isfinite().all()):
                raise TaskError(f"reset() returned NaN or infinity in observations {group!r}", key=self.name)
        return obs

    def step(self, action: Tensor) -> Step:
        """Advance all envs by one control step and reset those whose episode ended; see `GymnasiumEnv.step`."""
        require_shape(action, self.num_envs, self.num_actions)
        with self._in_order():
            bad_action = ~action.isfinite().all(dim=1)
            sent = self._to_library(action.masked_fill(bad_action[:, None], 0))
            library_obs, reward, terminated, truncated, extras = self._envs.step(sent)
            ended = terminated | truncated
            if not self._stepped:  # some names appear only with the first step
                self._take_names(extras)
                self._stepped = True
            if self._time_limit_ends:
                terminated = ended
            obs = self._numbers(library_obs)
            final_obs = self._final_obs(obs, ended, extras)
            not_finite = ~reward.isfinite()
            for value in final_obs.values():
                not_finite = not_finite | ~value.isfinite().all(dim=1)
            skipped = self._resetting & ended  # the library spent this step on resetting a diverged env
            self._not_finite |= not_finite & ~skipped
            diverged = not_finite | bad_action | skipped
            obs, begun = self._begin_episodes(obs, ended, diverged)
            self._resetting = diverged & ~begun
            truncated = truncated & ~terminated & ~diverged
            terminated = terminated & ~diverged
            return Step(
                obs={group: value.masked_fill(~value.isfinite(), 0.0) for group, value in obs.items()},
                final_obs={group: value.masked_fill(diverged[:, None], 0.0) for group, value in final_obs.items()},
                reward=reward.float().masked_fill(diverged, 0.0),
                terms={name: value.masked_fill(diverged, 0.0) for name, value in self._terms().items()},
                stats=self._stats(ended & ~skipped, extras),
                terminated=terminated,
                truncated=truncated,
                diverged=diverged,
                bad_action=bad_action,
                done=ended | diverged,
                incomplete=diverged.clone(),
                skipped=skipped,
            )

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """Run the library on torch's default stream, with which Warp's streams synchronise."""
        if self.device.type != "cuda":
            yield
            return
        ours, default = torch.cuda.current_stream(self.device), torch.cuda.default_stream(self.device)
        default.wait_stream(ours)
        with torch.cuda.stream(default):
            yield
        ours.wait_stream(default)

    def _take_names(self, extras: Mapping[str, Any]) -> None:
        """Add the names of the library's log entries; metrics need the same columns in every step."""
        rewards = _SUMS if self._rewards is not None else ()
        names = [name for name in extras.get("log", {}) if not name.startswith(rewards)]
        self._stat_names = [*dict.fromkeys(self._stat_names + names)]

    @abstractmethod
    def _final_obs(self, obs: Observation, ended: Mask, extras: Mapping[str, Any]) -> Observation:
        """Return the observations after the step, before any reset."""

    @abstractmethod
    def _begin_episodes(self, obs: Observation, ended: Mask, diverged: Mask) -> tuple[Observation, Mask]:
        """Begin episodes in ended and diverged envs; return observations and a mask of the envs that begin now.

        Other diverged envs begin at the end of the next step, which is not used as a sample.
        """

    def _numbers(self, obs: Any) -> Observation:
        """Copy the library's observations to our groups, float32 [num_envs, size]."""
        if not isinstance(obs, Mapping):
            key = f"{self.name}: observations"
            raise ConfigError(key=key, expected="named groups of tensors", got=type(obs).__name__)
        if self.groups["policy"] not in obs:
            problem = f"no observation group {self.groups['policy']!r}"
            raise ConfigError(problem, key=self.name, hint=f"Available: {', '.join(sorted(obs))}")
        numbers = {}
        for group, theirs in self.groups.items():
            if theirs in obs:
                terms = [*obs[theirs].values()] if isinstance(obs[theirs], Mapping) else [obs[theirs]]
                if any(term.dim() > 3 for term in terms):
                    hint = "Try an env with numeric observations"
                    raise ConfigError(f"observation group {theirs!r} contains images", key=self.name, hint=hint)
                numbers[group] = torch.cat([x.detach().reshape(self.num_envs, -1).float() for x in terms], dim=1)
        return numbers

    def _terms(self) -> dict[str, Tensor]:
        if self._rewards is None:
            return {}
        scale = self._envs.step_dt if getattr(self._envs.cfg, "scale_rewards_by_dt", True) else 1.0
        terms = self._rewards._step_reward * scale
        return dict(zip(self._rewards.active_terms, terms.unbind(1), strict=True))

    def _stats(self, ended: Mask, extras: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the library's log entries as means, [num_envs] each; NaN for envs whose episode continues."""
        log, missing = extras.get("log", {}), torch.full((self.num_envs,), torch.nan, device=self.device)
        stats = {}
        for name in self._stat_names:
            value = log.get(name)
            value = torch.nan if value is None else value
            if not isinstance(value, Tensor):
                value = torch.full((), float(value), device=self.device)
            mean = value.detach().to(self.device).float().mean()
            if self.counts_ends and name.startswith(_ENDS):
                mean = mean / ended.sum()
            stats[name] = torch.where(ended & mean.isfinite(), mean, missing)
        return stats

    def first_diverged(self) -> dict[str, Any] | None:
        """Warn about the first env with a non-finite number; return None, as no state is recorded."""
        bad = self._not_finite.nonzero().flatten().tolist()
        if bad:
            message = "%s: step() returned NaN or infinity (env %d). These samples are dropped; see sim/diverged"
            logger.warning(message, self.name, bad[0])
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the curriculum state of the library."""
        state: dict[str, Any] = {"common_step_counter": int(self._envs.common_step_counter)}
        if (levels := self._terrain_levels()) is not None:
            state["terrain_levels"] = levels.clone()
        curricula = {name: term.get_state().clone() for name, term in self._curricula().items()}
        return state | ({"curricula": curricula} if curricula else {})

    def begin_from(self, state: dict[str, Any]) -> Observation:
        """Begin new episodes with a saved curriculum state; env i takes entry i modulo the saved number of envs."""
        self._envs.common_step_counter = int(state.get("common_step_counter", 0))
        index = torch.arange(self.num_envs, device=self.device)
        for name, term in self._curricula().items():
            if name in state.get("curricula", {}):
                saved = state["curricula"][name].to(self.device)
                term.set_state(saved[index % len(saved)] if saved.dim() else saved)
        levels, saved = self._terrain_levels(), state.get("terrain_levels")
        if levels is None or saved is None:
            return self.reset()
        terrain = self._envs.scene.terrain
        levels.copy_(saved.to(self.device)[index % len(saved)])
        terrain.env_origins[:] = terrain.terrain_origins[levels, terrain.terrain_types]
        terrain.update_env_origins = lambda *_, **__: None  # this reset must not change levels
        try:
            return self.reset()
        finally:
            del terrain.update_env_origins

    def _curricula(self) -> dict[str, Any]:
        manager = getattr(self._envs, "curriculum_manager", None)
        names, cfgs = (getattr(manager, attribute, ()) for attribute in ("_term_names", "_term_cfgs"))
        return {name: cfg.func for name, cfg in zip(names, cfgs, strict=False) if hasattr(cfg.func, "set_state")}

    def _terrain_levels(self) -> Tensor | None:
        """Return the terrain levels, int64 [num_envs]; None without levels."""
        terrain = getattr(self._envs.scene, "terrain", None)
        levels = getattr(terrain, "terrain_levels", None)
        return levels if getattr(terrain, "terrain_origins", None) is not None else None

    def close(self) -> None:
        """Close the envs."""
        self._envs.close()


_SUMS, _ENDS = "Episode_Reward/", "Episode_Termination/"  # log prefixes; we log reward terms per step instead


def actions_of(space: Any, device: torch.device, name: str) -> tuple[ActionSpace, Callable[[Tensor], Tensor]]:
    """Return our action space, and a function that maps our actions to the library's."""
    if hasattr(space, "low") and hasattr(space, "high"):
        size = int(np.prod(space.shape))
        low, high = (
            torch.tensor(np.broadcast_to(bound, space.shape).reshape(-1), dtype=torch.float32, device=device)
            for bound in (space.low, space.high)
        )
        bounded = low.isfinite() & high.isfinite()
        middle, half = torch.where(bounded, (low + high) / 2, 0.0), torch.where(bounded, (high - low) / 2, 1.0)

        def to_box(action: Tensor) -> Tensor:
            scaled = middle + half * torch.where(bounded, action.clamp(-1.0, 1.0), action)
            return torch.minimum(torch.maximum(scaled, low), high).reshape(-1, *space.shape)

        limit = 1.0 if bool(bounded.all()) else None
        bounds = tuple(zip(low.tolist(), high.tolist(), strict=True))
        return Box(size, limit, bounds), to_box if bool(low.isfinite().any() | high.isfinite().any()) else _unchanged
    if hasattr(space, "nvec") or hasattr(space, "n"):
        counts: Iterable[Any] = space.nvec.flatten() if hasattr(space, "nvec") else (space.n,)
        return MultiDiscrete(tuple(map(int, counts))), _unchanged
    raise ConfigError(key=f"{name}: action space", expected="a Box, Discrete or MultiDiscrete", got=space)


def _unchanged(action: Tensor) -> Tensor:
    return action
