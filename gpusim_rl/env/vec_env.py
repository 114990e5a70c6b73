"""Task loop: control decimation, time limit, same-step auto-reset by mask, staggered starts."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from gpusim_rl.env.environment import Environment, Observation, Step
from gpusim_rl.env.hook_checks import HookChecks, action_space
from gpusim_rl.env.image_noise import ImageNoise
from gpusim_rl.env.nan_guard import NanGuard
from gpusim_rl.env.observations import ObservationGroups, SensorModel, TaskObservation, is_image
from gpusim_rl.env.randomize import Randomizer
from gpusim_rl.env.reached_states import ReachedStates
from gpusim_rl.env.stateful import fitting
from gpusim_rl.env.task import Task, TaskConfig
from gpusim_rl.errors import TaskError
from gpusim_rl.machine.compiled import Compiled
from gpusim_rl.machine.torch_threads import limit_torch_threads
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.sim import Sim, SimChoice, make_sim
from gpusim_rl.spaces import MultiDiscrete

COMPILED = {
    "_before_physics": "the step before the physics",
    "_after_physics": "the step after the physics",
    "_write_starts": "the reset",
    "_look": "the observation",
}
"""Methods of `VecEnv` that can be compiled, with their names in warnings. They do not call each other."""


class VecEnv(Environment):
    """Task on a simulator, in `num_envs` envs at once. An invalid hook raises TaskError, here and in later calls.

    Args:
        task_class: Class of the task.
        cfg: Settings of the task.
        sim: Simulator with the scene `task_class.scene(cfg)`.
        seed: Seed of the task's random numbers.
        check: Whether every step checks that all values are finite, for debugging. Synchronises with the device.

    Attributes:
        obs_terms: Observation terms by group, in order; known after `reset`.
        progress: Control steps since the (staggered) start of each episode, int64 [num_envs].
        staggered: Envs whose episode began partway through the time limit, bool [num_envs].
        nan_guard: State and action before the first divergence.
        randomizer: Domain randomisation, if `cfg.randomize`; else None.
    """

    def __init__(self, task_class: type[Task], cfg: TaskConfig, sim: Sim, seed: int, *, check: bool = False) -> None:
        self.cfg = cfg
        self.sim = sim
        self.num_envs = sim.num_envs
        self.device = sim.device
        self.task = task_class(cfg, sim)
        self.name = task_class.__name__
        self.stateful = [self.task]
        self.num_threads = getattr(sim, "num_threads", None)
        self.action_space = action_space(self.task, cfg)
        self.num_actions = self.action_space.size
        self.max_episode_length = self.steps_between_truncations = cfg.episode_length
        self.physics_evaluations = cfg.decimation * sim.scene.evaluations
        text = f"control {cfg.control_hz:g} Hz, physics {cfg.physics_hz:g} Hz, episode {cfg.episode_length} steps"
        sizes = " ".join(f"sim.{name}={size}" for name, size in sim.buffers.items())
        self.summary = f"{text}, {sizes}" if sizes else text
        counts = self.action_space.counts if isinstance(self.action_space, MultiDiscrete) else None
        dtype = torch.float32 if counts is None else torch.int64
        self.task.actions = torch.zeros(self.num_envs, self.num_actions, dtype=dtype, device=self.device)
        self._last_option = None if counts is None else torch.tensor(counts, device=self.device) - 1
        # Unchanged tensors are not saved: a resumed run builds them from its own settings.
        self._initial: dict[str, Tensor] = self.task.state_dict()["tensors"]
        self.task.random.seed(seed)
        self.progress = self.task.progress
        self.staggered = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self.nan_guard = NanGuard(sim, self.num_actions)
        self.randomizer: Randomizer | None = None
        if cfg.randomize:
            count, limit = self.num_actions, cfg.clip_actions
            self.randomizer = Randomizer(
                cfg.randomization_params, sim, num_actions=count, dt=self.task.dt, clip_actions=limit, seed=seed
            )
        self.reached: ReachedStates | None = None
        if cfg.reset_from.share > 0.0:
            self.reached = ReachedStates(cfg.reset_from, self.task, sim, seed)
            self.stateful = [self.task, self.reached]
        noise = None if self.randomizer is None else self.randomizer.observations
        self._groups = ObservationGroups(self.task, cfg.observations, noise, seed)
        self.obs_sizes, self.obs_terms, self.images = self._groups.sizes, self._groups.terms, self._groups.images
        self._checks = HookChecks(self.task, self._groups)
        self._check_values = check
        self._obs: Observation = {}
        self._stepped = False

    @classmethod
    def make(
        cls, task_class: type[Task], cfg: TaskConfig, *, num_envs: int, choice: SimChoice, sim: SimConfig, seed: int
    ) -> VecEnv:
        """Build scene, simulator and environment."""
        return cls(task_class, cfg, make_sim(task_class.built_scene(cfg), choice, num_envs, sim), seed)

    @property
    def overflow(self) -> Bool[Tensor, " envs"]:
        """Envs in which a simulator buffer overflowed."""
        return self.sim.overflow

    @property
    def buffers(self) -> dict[str, tuple[int, Float[Tensor, ""]]]:
        """Capacity and demand per env of each simulator buffer, by setting name; see `Sim.needs`."""
        return {name: (self.sim.buffers[name], need) for name, need in self.sim.needs.items()}

    def first_diverged(self) -> dict[str, Any] | None:
        """Return the first divergence, or None; see `NanGuard.read`."""
        return self.nan_guard.read()

    def reset(self) -> Observation:
        """Begin an episode in every env and check the hooks once; raise a TaskError that names an invalid hook."""
        everywhere = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self.begin_episodes(everywhere)
        task, checks = self.task, self._checks
        checks.finite_observation(self._groups.read(self._task_obs()))
        terms = task.rewards()
        checks.reward_terms(terms)
        checks.finite_terms(terms)
        checks.mask("terminated", task.terminated())
        task.advance(torch.zeros_like(everywhere))
        checks.stats(task.stats())
        # rewards() may keep state, such as a potential: discard the checked step.
        return self.begin_episodes(everywhere, staggered=self.cfg.randomize_episode_start)

    def begin_episodes(self, where: Bool[Tensor, " envs"], *, staggered: bool = False) -> Observation:
        """Begin episodes in masked envs (partway through the time limit if `staggered`); return all observations."""
        # The order matters: the scene's default state, the task's random state, the resulting body poses.
        self.sim.reset(where)
        self._write_starts(where)
        self.sim.refresh()
        self.sim.draw()
        if staggered:
            start = self.task.random.integers(0, self.max_episode_length)
            torch.where(where, start, self.progress, out=self.progress)
            self.staggered |= where
        return self.look()

    def look(self) -> Observation:
        """Recompute and return the current observation after a change in what the task observes."""
        self._obs = self._look()
        return self._obs

    def seed(self, seed: int) -> None:
        """Restart all random numbers from another seed."""
        self.task.random.seed(seed)
        for owner in self._optional().values():
            owner.seed(seed)

    def step(self, action: Shaped[Tensor, "envs actions"]) -> Step:
        """Advance all envs by one control step; invalid actions raise ValueError, an invalid hook raises TaskError."""
        expected = list(self.task.actions.shape)
        if list(action.shape) != expected:
            raise ValueError(f"step() expects actions of shape {expected}, got {list(action.shape)}")
        if self._last_option is not None and action.dtype != torch.int64:
            raise ValueError(f"step() expects action indices of type torch.int64, got {action.dtype}")
        with limit_torch_threads(self.num_envs, self.device):
            return self._step(action)

    def _step(self, action: Shaped[Tensor, "envs actions"]) -> Step:
        checks = self._checks
        if self._check_values:
            checks.finite(f"{self.name}.step()", "the action", action)
        bad_action = self._before_physics(action)
        if self._check_values and bool(bad_action.any()):
            problem = f"a control or a force is not finite (env {int(bad_action.int().argmax())})"
            raise TaskError(problem, key=f"{self.name}.apply_action()")
        self.sim.step(self.cfg.decimation)
        self._stepped = True
        step = self._after_physics(bad_action)
        if self._check_values:
            checks.finite_terms(step.terms)
            checks.finite_observation(step.final_obs)
        step.obs = self.begin_episodes(step.done)
        if self._check_values:
            checks.finite_observation(step.obs)
        return step

    def put_action(self, action: Shaped[Tensor, "envs actions"]) -> None:
        """Write clamped actions into `task.actions`, with 0 in place of NaN."""
        # A task that uses NaN as an index could crash the process.
        if self._last_option is None:
            limit = self.cfg.clip_actions
            torch.nan_to_num(action, nan=0.0, out=self.task.actions).clamp_(-limit, limit)
        else:
            torch.minimum(action.clamp(min=0), self._last_option, out=self.task.actions)

    def _before_physics(self, action: Shaped[Tensor, "envs actions"]) -> Bool[Tensor, " envs"]:
        """Apply the actions; return the mask of envs with a bad action, control or force."""
        task, randomizer = self.task, self.randomizer
        self.put_action(action)
        applied = task.actions if randomizer is None else randomizer.act(task.actions)
        task.apply_action(applied)
        if randomizer is not None:
            randomizer.before_physics()
        return self.nan_guard.before_step(action, applied)

    def _after_physics(self, bad_action: Bool[Tensor, " envs"]) -> Step:
        """Return the step's results before the resets: `obs` is still `final_obs`."""
        task = self.task
        if self.randomizer is not None:
            self.randomizer.after_physics()
        self.progress += 1

        terms = task.rewards()
        self._checks.reward_terms(terms)
        terminated = task.terminated()
        self._checks.mask("terminated", terminated)
        # A diverged env is masked out and reset. A bad action counts as divergence: simulators differ in its effect.
        diverged = self.sim.diverged | bad_action
        self.nan_guard.after_step(diverged, self.progress, bad_action)
        values = torch.stack(list(terms.values())).masked_fill_(diverged, 0.0)
        terms = dict(zip(terms, values.unbind(), strict=True))
        terminated = terminated > diverged  # terminated & ~diverged in one kernel
        ended = terminated | diverged
        truncated = (self.progress >= self.max_episode_length).masked_fill_(ended, False)
        done = ended | truncated
        incomplete = torch.where(truncated, self.staggered, diverged)  # no env is truncated and diverged
        task.advance(done)
        if self._groups.sensors is not None:
            self._groups.sensors.advance()
        stats = task.stats()
        if stats:
            numbers = torch.stack(list(stats.values())).masked_fill_(diverged, torch.nan)
            stats = dict(zip(stats, numbers.unbind(), strict=True))
        final_obs = {
            group: value if is_image(value) else value.masked_fill_(diverged[:, None], 0.0)
            for group, value in self._observe().items()
        }
        if self._groups.image_noise is not None:  # the final observation repeats the previous images
            self._groups.image_noise.draw()
        if self.reached is not None:
            worth = task.worth_keeping()
            self._checks.mask("worth_keeping", worth)
            self.reached.keep(worth & ~done)
        reward = values.sum(dim=0)
        ends = terminated, truncated, diverged, bad_action, done, incomplete
        return Step(final_obs, final_obs, reward, terms, stats, *ends)

    def _write_starts(self, where: Bool[Tensor, " envs"]) -> None:
        self.task.actions.masked_fill_(where[:, None], 0)
        self.progress.masked_fill_(where, 0)
        self.staggered.masked_fill_(where, False)
        for randomness in (self.randomizer, self._groups.sensors):
            if randomness is not None:
                randomness.begin_episodes(where)
        self.task.reset(where)
        if self.reached is not None:
            self.reached.begin(where)

    def _look(self) -> Observation:
        return self._observe()

    def compile(self, backend: str = "inductor") -> None:
        """Compile the step around the physics with torch.compile, after `reset`; warn about code that stays eager."""
        if not self._stepped:  # one-time setup of a first step must not be compiled; the step is undone
            state, task = self.state_dict(), vars(self.task)
            plain = {name: value for name, value in task.items() if isinstance(value, bool | int | float | str)}
            self.step(torch.zeros_like(self.task.actions))
            self.load_state_dict(state)
            task.update(plain)
            self.nan_guard.forget()
        for name, meaning in COMPILED.items():
            setattr(self, name, Compiled(getattr(self, name), f"{self.name}: {meaning}", backend))

    def clean_obs(self) -> Observation:
        """Return the observation without noise, delay, history and clipping."""
        return self._groups.read(self._task_obs(), clean=True)

    def _task_obs(self) -> TaskObservation:
        obs: Any = self.task.observe()
        if isinstance(obs, Tensor):
            obs = {"policy": obs}
        self._checks.observation(obs)
        if not self.obs_sizes:
            self._groups.describe(obs)
        return obs

    def _observe(self) -> Observation:
        raw = self._task_obs()
        obs, limit = self._groups.read(raw), self.cfg.clip_observations
        # Copied: a task may return a view of the simulator's memory, and an earlier Step must not change.
        if limit is None:
            return {group: value.clone() if value is raw.get(group) else value for group, value in obs.items()}
        # Infinity becomes NaN (0 * inf) instead of the limit; finite values keep their bits.
        return {
            group: value.clone() if is_image(value) else value.clamp(-limit, limit).add_(value, alpha=0)
            for group, value in obs.items()
        }

    def _optional(self) -> dict[str, Randomizer | ReachedStates | SensorModel | ImageNoise]:
        owned = {"sensors": self._groups.sensors, "images": self._groups.image_noise}
        owned |= {"randomizer": self.randomizer, "reached": self.reached}
        return {name: owner for name, owner in owned.items() if owner is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, except settings."""
        task = self.task.state_dict()
        task["tensors"] = {k: v for k, v in task["tensors"].items() if not torch.equal(v, self._initial[k])}
        return {
            **{name: owner.state_dict() for name, owner in self._optional().items()},
            "sim": self.sim.state_dict(),
            "task": task,
            "progress": self.progress.clone(),
            "staggered": self.staggered.clone(),
            "obs": {group: value.clone() for group, value in self._obs.items() if not is_image(value)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        """Restore `state_dict` (same simulator and number of envs); return the observation to act on."""
        sim_state, randomizer = state["sim"], self.randomizer
        if randomizer is not None and state.get("randomizer", {}).get("params") != randomizer.params:
            sim_state = {**sim_state, "params": {}, "constants": {}}  # drawn with other settings
        self.sim.load_state_dict(sim_state)
        tensors = self._initial | fitting(state["task"]["tensors"], self._initial)
        self.task.load_state_dict({**state["task"], "tensors": tensors})
        for name, owner in self._optional().items():
            if name in state:
                owner.load_state_dict(state[name])
        self.progress.copy_(state["progress"])
        self.staggered.copy_(state["staggered"])
        self._obs = {group: value.to(self.device) for group, value in state["obs"].items()}
        if self.images:  # not saved: rendered again
            self._obs |= {group: value for group, value in self._observe().items() if group in self.images}
        return self._obs

    def begin_from(self, state: dict[str, Any]) -> Observation:
        """Begin new episodes with the training progress of another run of the task; call it after `reset`.

        Task tensors (levels, counters) and randomisation schedules come from the state; random numbers do not. The
        other run may have used another simulator, and M envs: env i takes the values of its env i modulo M.
        """
        current, saved = self.task.state_dict(), state["task"]["tensors"]
        sources = torch.arange(self.num_envs) % len(state["progress"])
        tensors = dict(self._initial)
        for name, value in tensors.items():
            other = saved.get(name, value)
            if other.shape != value.shape and other.shape[:1] == state["progress"].shape:
                other = other[sources.to(other.device)]
            tensors[name] = other if other.shape == value.shape else value
        self.task.load_state_dict({**current, "tensors": tensors})
        for name, owner in self._optional().items():
            if name in state and isinstance(owner, Randomizer | SensorModel):
                owner.begin_from(state[name])
        everywhere = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        return self.begin_episodes(everywhere, staggered=self.cfg.randomize_episode_start)

    def close(self) -> None:
        """Free the simulator."""
        self.sim.close()
