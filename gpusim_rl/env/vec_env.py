"""The loop around a task: control decimation, time limit, same-step auto-reset by mask, staggered starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from gpusim_rl.env.environment import Environment, Observation, Parts, Step
from gpusim_rl.env.nan_guard import NanGuard
from gpusim_rl.env.observations import ObservationPart, SensorModel, check_names, describe
from gpusim_rl.env.randomize import Randomizer
from gpusim_rl.env.reached_states import ReachedStates
from gpusim_rl.env.task import Task, TaskConfig
from gpusim_rl.errors import ConfigError, TaskError, did_you_mean
from gpusim_rl.machine.compiled import Compiled
from gpusim_rl.machine.torch_threads import limit_torch_threads
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.sim import Sim, SimChoice, make_sim
from gpusim_rl.sim.interface import not_finite
from gpusim_rl.spaces import ActionSpace, Box, MultiDiscrete

PARTS = {
    "_act": "what is before the physics",
    "_judge": "what is after the physics",
    "_begin_episodes": "the reset",
    "_look": "the observation",
}
"""Parts of a step that can be compiled: methods of `VecEnv`, and what they are."""


TaskObservation = Mapping[str, Tensor | Parts]
"""Observation groups of a task by name: a tensor [num_envs, size], or the named parts of one."""


class VecEnv(Environment):
    """Runs a task on a simulator, in `num_envs` envs at once.

    Args:
        task_class: Class of the task.
        cfg: Configuration of the task.
        sim: Simulator of `task_class.scene(cfg)`.
        seed: Seed of all random numbers of the task.
        check: Whether every step checks that all values are finite. It waits for the device: use it to debug a task.

    Raises:
        TaskError: The task did not set `num_actions`. Later calls raise it too: a hook returned a wrong type, shape or
            device, or a value that is not finite.
        ConfigError: `cfg.randomization_params` is wrong.

    Attributes:
        obs_sizes: Size of each observation group; known after `reset`.
        obs_parts: The named parts of those groups that have some, in their order; known after `reset`.
        num_actions: Size of the action vector.
        progress: Control steps since the (staggered) start of each episode, int64 [num_envs].
        staggered: Envs whose episode began in the middle of its time limit, bool [num_envs].
        nan_guard: Keeps the state and action before the first divergence.
        randomizer: Randomises physics, observations and actions, if `cfg.randomize`; else None.
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
        self._check = check
        num_actions = getattr(self.task, "num_actions", None)
        if not isinstance(num_actions, int) or num_actions < 1:
            raise TaskError(f"{self.name}.__init__ must set self.num_actions to a positive int, got {num_actions!r}")
        self.num_actions = num_actions
        self._space = _action_space(self.task, cfg, self.name)
        counts = self._space.counts if isinstance(self._space, MultiDiscrete) else None
        dtype = torch.float32 if counts is None else torch.int64
        self.task.actions = torch.zeros(self.num_envs, self.num_actions, dtype=dtype, device=self.device)
        # Options of a choice are counted from 0: the last of each.
        self._last_option = None if counts is None else torch.tensor(counts, device=self.device) - 1
        # Tensors that never changed are not saved. A resumed run makes them again, from its own configuration.
        self._initial: dict[str, Tensor] = self.task.state_dict()["tensors"]
        self.task.random.seed(seed)
        self.progress = self.task.progress
        self.staggered = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self.nan_guard = NanGuard(sim, self.num_actions)
        self.randomizer: Randomizer | None = None
        if cfg.randomize:
            self.randomizer = Randomizer(
                cfg.randomization_params,
                sim,
                num_actions=self.num_actions,
                dt=self.task.dt,
                clip_actions=cfg.clip_actions,
                seed=seed,
            )
        self.reached: ReachedStates | None = None
        if cfg.reset_from.share > 0.0:
            self.reached = ReachedStates(cfg.reset_from, self.task, sim, seed)
            self.stateful = [self.task, self.reached]
        self.obs_sizes: dict[str, int] = {}
        self.obs_parts: dict[str, tuple[ObservationPart, ...]] = {}
        self._scales: dict[str, Tensor] = {}  # of the groups in which a part has one
        self._sensors: SensorModel | None = None
        self._seed = seed
        self._obs: Observation = {}
        self._stepped = False

    @classmethod
    def make(
        cls, task_class: type[Task], cfg: TaskConfig, *, num_envs: int, choice: SimChoice, sim: SimConfig, seed: int
    ) -> VecEnv:
        """Builds scene, simulator and environment.

        Args:
            task_class: Class of the task.
            cfg: Configuration of the task.
            num_envs: Number of envs.
            choice: Simulator and device.
            sim: Settings of the simulator.
            seed: Seed of all random numbers of the task.

        Raises:
            ConfigError: A setting is wrong.
            TaskError: The scene or the task is wrong.
        """
        return cls(task_class, cfg, make_sim(task_class.scene(cfg), choice, num_envs, sim), seed)

    @property
    def max_episode_length(self) -> int:
        """Time limit of an episode [control steps]."""
        return self.cfg.episode_length

    @property
    def action_space(self) -> ActionSpace:
        """The actions that `step` takes."""
        return self._space

    @property
    def physics_evaluations(self) -> int:
        """How often a control step evaluates the dynamics."""
        return self.cfg.decimation * self.sim.scene.evaluations

    @property
    def summary(self) -> str:
        """What the start of a run tells of it."""
        cfg = self.cfg
        text = f"control {cfg.control_hz:g} Hz, physics {cfg.physics_hz:g} Hz, episode {cfg.episode_length} steps"
        return f"{text}, {self.sim.buffers}" if self.sim.buffers else text

    @property
    def overflow(self) -> Bool[Tensor, " envs"]:
        """Envs in which the simulator ran out of room for contacts or constraints."""
        return self.sim.overflow

    def first_diverged(self) -> dict[str, Any] | None:
        """The state and action before the first divergence, see `NanGuard.read`."""
        return self.nan_guard.read()

    def reset(self) -> Observation:
        """Resets all envs, staggers the starts of episodes if configured, and checks the task's hooks once.

        Returns:
            The observation to act on.

        Raises:
            TaskError: A hook is wrong; the message names it.
        """
        everywhere = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self._reset(everywhere)
        self._check_hooks()
        if self.randomizer is not None:
            self.randomizer.start(self.obs_sizes["policy"])
        # rewards() may keep state, for example a potential. The check was not a step of an episode: reset again.
        return self._begin()

    def _begin(self) -> Observation:
        self._reset(torch.ones(self.num_envs, dtype=torch.bool, device=self.device))
        if self.cfg.randomize_episode_start:
            self.progress.copy_(self.task.random.integers(0, self.max_episode_length))
        self.staggered.fill_(self.cfg.randomize_episode_start)
        self._obs = self._observe()
        return self._obs

    def begin_episodes(self, where: Bool[Tensor, " envs"]) -> Observation:
        """Begins new episodes in the envs of a mask; those under way are forgotten. Call it after `reset`.

        Returns:
            The observation to act on, of all envs.
        """
        self._reset(where)
        self.staggered.masked_fill_(where, False)
        self._obs = self._look()
        return self._obs

    def seed(self, seed: int) -> None:
        """Begins all random numbers anew, from another seed."""
        self.task.random.seed(seed)
        for part in (self.randomizer, self.reached, self._sensors):
            if part is not None:
                part.seed(seed)

    def _check_hooks(self) -> None:
        obs = self._task_obs()
        if not self.obs_sizes:
            self._describe(obs)
        self._check_finite("observe", self._joined(obs))
        terms = self.task.rewards()
        self._check_terms(terms)
        self._check_finite("rewards", terms)
        self._check_mask("terminated", self.task.terminated())
        self.task.advance(torch.zeros(self.num_envs, dtype=torch.bool, device=self.device))
        for name, value in self.task.stats().items():
            self._check_tensor(f"{self.name}.stats()[{name!r}]", value, (self.num_envs,), torch.float32)

    def _describe(self, obs: TaskObservation) -> None:
        """Finds out what the task's observation consists of."""
        task, sensors = self.task, self.cfg.observations
        named = {group: value for group, value in obs.items() if not isinstance(value, Tensor)}
        check_names(sensors, named.get("policy", {}))
        known = {name for parts in named.values() for name in parts} | task.units.keys()  # there may be other modes
        for name in task.scales:
            if name not in known:
                raise TaskError(f"{self.name}.scales[{name!r}]: observe() has no such part.{did_you_mean(name, known)}")
        for group, parts in named.items():
            self.obs_parts[group] = described = describe(
                parts, task.units, task.scales, sensors if group == "policy" else {}
            )
            scale = [part.scale for part in described for _ in range(part.size * part.history)]
            if any(factor != 1.0 for factor in scale):
                self._scales[group] = torch.tensor(scale, device=self.device)
        if sensors:
            self._sensors = SensorModel(self.obs_parts["policy"], self.num_envs, self.device, self._seed)
        self.obs_sizes = {group: value.shape[1] for group, value in self._joined(obs).items()}

    def _joined(self, obs: TaskObservation) -> Observation:
        """One tensor for each group. That of named parts is new memory."""
        joined = {}
        for group, value in obs.items():
            if not isinstance(value, Tensor):
                read = list(value.values())
                if group == "policy" and self._sensors is not None:
                    read = self._sensors.read(value)
                value = torch.cat(read, dim=1)
                if group in self._scales:
                    value *= self._scales[group]
            joined[group] = value
        return joined

    def step(self, action: Shaped[Tensor, "envs actions"]) -> Step:
        """Advances all envs by one control step and resets those whose episode ended.

        Args:
            action: Actions, shape [num_envs, num_actions]; clamped here to [-clip_actions, clip_actions]. Of a discrete
                space indices, int64; clamped here to those that there are.

        Raises:
            ValueError: The actions have another shape, or those of a discrete space another type.
            TaskError: A hook is wrong; the message names it.
        """
        expected = list(self.task.actions.shape)
        if list(action.shape) != expected:
            raise ValueError(f"step() needs actions of shape {expected}, got {list(action.shape)}")
        if self._last_option is not None and action.dtype != torch.int64:
            raise ValueError(f"step() needs indices of type torch.int64, got {action.dtype}")
        with limit_torch_threads(self.num_envs, self.device):
            return self._step(action)

    def _step(self, action: Shaped[Tensor, "envs actions"]) -> Step:
        if self._check:
            self._check_values(f"{self.name}: the action given to step()", action)
        bad_action, bad_input = self._act(action)
        if self._check and bool(bad_input.any()):
            where = f"env {int(bad_input.int().argmax())}"
            raise TaskError(f"{self.name}.apply_action(): a control or a force is not finite ({where})")
        self.sim.step(self.cfg.decimation)
        self._stepped = True
        step = self._judge(bad_action, bad_input)
        if self._check:
            self._check_finite("rewards", step.terms)
            self._check_finite("observe", step.final_obs)
        self._reset(step.done)
        step.obs = self._obs = self._look()
        if self._check:
            self._check_finite("observe", self._obs)
        return step

    # The parts of a step between which the simulator works; none calls another, so that each can be compiled.

    def put_action(self, action: Shaped[Tensor, "envs actions"]) -> None:
        """Writes actions that the task may get into `task.actions`: a NaN becomes 0, the rest is clamped."""
        # A task gets no NaN: what it makes of one (an index, say) could end the process.
        if self._last_option is None:
            limit = self.cfg.clip_actions
            torch.nan_to_num(action, nan=0.0, out=self.task.actions).clamp_(-limit, limit)
        else:
            torch.minimum(action.clamp(min=0), self._last_option, out=self.task.actions)

    def _act(self, action: Shaped[Tensor, "envs actions"]) -> tuple[Bool[Tensor, " envs"], Bool[Tensor, " envs"]]:
        """Before the physics; returns the envs with a bad action, and those with a bad control or force."""
        task, randomizer = self.task, self.randomizer
        bad_action = not_finite([action]) if self._last_option is None else action.isnan().any(dim=1)  # no index is
        self.put_action(action)
        applied = task.actions if randomizer is None else randomizer.act(task.actions)
        task.apply_action(applied)
        bad_input = self.sim.bad_inputs
        if randomizer is not None:
            randomizer.before_physics()
        self.nan_guard.before_step(torch.where(bad_action[:, None], action, applied))
        return bad_action, bad_input

    def _judge(self, bad_action: Bool[Tensor, " envs"], bad_input: Bool[Tensor, " envs"]) -> Step:
        """After the physics; returns the step, `final_obs` in place of `obs`."""
        task = self.task
        if self.randomizer is not None:
            self.randomizer.after_physics()
        self.progress += 1

        terms = task.rewards()
        self._check_terms(terms)
        terminated = task.terminated()
        self._check_mask("terminated", terminated)
        # A diverged env is masked out: all that the task computed from its state is replaced, and the env is reset.
        # A bad action counts as a divergence: what simulators make of it differs.
        bad_action = bad_action | bad_input
        diverged = self.sim.diverged | bad_action
        self.nan_guard.after_step(diverged, self.progress, bad_input)
        values = torch.stack(list(terms.values())).masked_fill_(diverged, 0.0)
        terms = dict(zip(terms, values.unbind(), strict=True))
        terminated = terminated > diverged  # of masks: and not
        ended = terminated | diverged
        truncated = (self.progress >= self.max_episode_length).masked_fill_(ended, False)
        done = ended | truncated
        incomplete = (self.staggered & truncated) | diverged
        task.advance(done)
        if self._sensors is not None:
            self._sensors.advance()
        stats = {name: value.masked_fill(diverged, torch.nan) for name, value in task.stats().items()}
        final_obs = {g: value.masked_fill_(diverged[:, None], 0.0) for g, value in self._observe().items()}
        if self.reached is not None:
            worth = task.worth_keeping()
            self._check_mask("worth_keeping", worth)
            self.reached.keep(worth & ~done)
        self.staggered.masked_fill_(done, False)
        reward = values.sum(dim=0)
        ends = terminated, truncated, diverged, bad_action, done, incomplete
        return Step(final_obs, final_obs, reward, terms, stats, *ends)

    def _reset(self, where: Bool[Tensor, " envs"]) -> None:
        # In this order: the scene's default state, the task's random initial state, the body poses that follow from it.
        self.sim.reset(where)
        self._begin_episodes(where)
        self.sim.refresh()

    def _begin_episodes(self, where: Bool[Tensor, " envs"]) -> None:
        self.task.actions.masked_fill_(where[:, None], 0)
        self.progress.masked_fill_(where, 0)
        if self.randomizer is not None:
            self.randomizer.reset(where)
        if self._sensors is not None:
            self._sensors.reset(where)
        self.task.reset(where)
        if self.reached is not None:
            self.reached.begin(where)

    def _look(self) -> Observation:
        return self._observe()

    def compile(self, enabled: bool = True, *, backend: str = "inductor") -> None:
        """Compiles what a step does besides the physics, by torch.compile, or goes back to eager code.

        Call it after `reset`. A part that cannot be compiled runs as it is; a warning names the task's method and line.

        Args:
            enabled: Compile.
            backend: Of torch.compile.
        """
        for name in PARTS:
            vars(self).pop(name, None)
        if not enabled:
            return
        if not self._stepped:  # what a first step sets up is no code for the compiler; the step itself is undone
            state, task = self.state_dict(), vars(self.task)
            plain = {name: value for name, value in task.items() if isinstance(value, bool | int | float | str)}
            self.step(torch.zeros_like(self.task.actions))
            self.load_state_dict(state)
            task.update(plain)
            self.nan_guard.forget()
        for name, what in PARTS.items():
            setattr(self, name, Compiled(getattr(self, name), f"{self.name}: {what}", backend))

    def _task_obs(self) -> TaskObservation:
        obs: Any = self.task.observe()
        if isinstance(obs, Tensor):
            obs = {"policy": obs}
        self._check_observation(obs)
        return obs

    def _observe(self) -> Observation:
        of_task = self._task_obs()
        obs, limit = self._joined(of_task), self.cfg.clip_observations
        if self.randomizer is not None:
            obs = {**obs, "policy": self.randomizer.observe(obs["policy"])}
        # Always new memory: a task may return a view of the simulator's memory, and an earlier Step must not change.
        if limit is None:
            return {group: value.clone() if value is of_task[group] else value for group, value in obs.items()}
        # 0 * inf is NaN: what is infinite must not look like the limit. What is finite keeps its bits.
        return {group: value.clamp(-limit, limit).add_(value, alpha=0) for group, value in obs.items()}

    # Checks of types and shapes cost nothing and run always. Checks of values wait for the device: `reset` runs
    # them once, `step` only with `check`. What hooks return is `Any` here: its type has not been checked yet.
    def _check_observation(self, obs: Any) -> None:
        hook = f"{self.name}.observe()"
        if not isinstance(obs, dict):
            kind = type(obs).__name__
            raise TaskError(f"{hook} returned {kind}, expected a tensor of shape [{self.num_envs}, size] or a dict")
        if "policy" not in obs:
            raise TaskError(f"{hook} returned the groups {list(obs)}, expected a group 'policy' among them")
        for group, value in obs.items():
            label = hook if list(obs) == ["policy"] else f"{hook}[{group!r}]"
            if not isinstance(value, dict):
                self._check_tensor(label, value, (self.num_envs, self.obs_sizes.get(group)), torch.float32)
                continue
            sizes = {part.name: part.size for part in self.obs_parts.get(group, ())}
            if not value or (sizes and list(value) != list(sizes)):
                raise TaskError(f"{label} returned the parts {list(value)}, expected {list(sizes) or 'at least one'}")
            for name, part in value.items():
                self._check_tensor(f"{label}[{name!r}]", part, (self.num_envs, sizes.get(name)), torch.float32)

    def _check_terms(self, terms: Any) -> None:
        hook = f"{self.name}.rewards()"
        if not isinstance(terms, dict):
            raise TaskError(f"{hook} returned {type(terms).__name__}, expected a dict of named terms")
        if not terms:
            raise TaskError(f"{hook} returned no terms, expected a dict with at least one")
        for name, term in terms.items():
            self._check_tensor(f"{hook}[{name!r}]", term, (self.num_envs,), torch.float32)

    def _check_mask(self, hook: str, mask: Any) -> None:
        self._check_tensor(f"{self.name}.{hook}()", mask, (self.num_envs,), torch.bool)

    def _check_tensor(self, label: str, value: Any, shape: tuple[int | None, ...], dtype: torch.dtype) -> None:
        expected = "[" + ", ".join("size" if size is None else str(size) for size in shape) + "]"
        if not isinstance(value, Tensor):
            raise TaskError(f"{label} returned {type(value).__name__}, expected a tensor of shape {expected}")
        if value.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape, value.shape, strict=True)):
            raise TaskError(f"{label} returned shape {list(value.shape)}, expected {expected}")
        if value.dtype != dtype:
            raise TaskError(f"{label} returned {value.dtype}, expected {dtype}")
        if value.device.type != self.device.type:
            raise TaskError(f"{label} returned a tensor on {value.device}, expected {self.device}")

    def _check_finite(self, hook: str, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            parts = self.obs_parts.get(name, ()) if hook == "observe" else ()
            of_columns = [part.name for part in parts for _ in range(part.size * part.history)]
            self._check_values(f"{self.name}.{hook}(): {name!r}", value, of_columns)

    def _check_values(self, what: str, value: Tensor, of_columns: Sequence[str] = ()) -> None:
        bad = ~torch.isfinite(value)
        if bool(bad.any()):
            env_id = int(bad.reshape(self.num_envs, -1).any(dim=1).int().argmax())
            number = int(bad[env_id].int().argmax()) if value.ndim > 1 else 0
            column = "" if value.ndim == 1 else f", column {number}"
            column += f" of {of_columns[number]!r}" if of_columns else ""
            raise TaskError(f"{what} is not finite (env {env_id}{column})")

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, except what follows from the configuration alone."""
        task = self.task.state_dict()
        task["tensors"] = {k: v for k, v in task["tensors"].items() if not torch.equal(v, self._initial[k])}
        randomizer = {} if self.randomizer is None else {"randomizer": self.randomizer.state_dict()}
        reached = {} if self.reached is None else {"reached": self.reached.state_dict()}
        sensors = {} if self._sensors is None else {"sensors": self._sensors.state_dict()}
        return {
            **sensors,
            **randomizer,
            **reached,
            "sim": self.sim.state_dict(),
            "task": task,
            "progress": self.progress.clone(),
            "staggered": self.staggered.clone(),
            "obs": {group: value.clone() for group, value in self._obs.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        """Restores the state of a run with the same number of envs on the same simulator.

        Args:
            state: What `state_dict` returned.

        Returns:
            The observation to act on.
        """
        self.sim.load_state_dict(state["sim"])
        # A tensor that had returned to its first value was not saved.
        self.task.load_state_dict({**state["task"], "tensors": self._initial | state["task"]["tensors"]})
        if self.randomizer is not None and "randomizer" in state:
            self.randomizer.load_state_dict(state["randomizer"])
        if self.reached is not None and "reached" in state:
            self.reached.load_state_dict(state["reached"])
        if self._sensors is not None and "sensors" in state:
            self._sensors.load_state_dict(state["sensors"])
        self.progress.copy_(state["progress"])
        self.staggered.copy_(state["staggered"])
        self._obs = {group: value.to(self.device) for group, value in state["obs"].items()}
        return self._obs

    def begin_from(self, state: dict[str, Any]) -> Observation:
        """Begins new episodes in all envs, at the training progress of another run of the task. Call it after `reset`.

        The task's tensors (levels, counters) and the schedules of randomisation are taken from the state. Random
        numbers are not. The other run may have another simulator and another number of envs M: env i takes the values
        of env i modulo M.

        Args:
            state: What `state_dict` of the other run returned.

        Returns:
            The observation to act on.
        """
        own, saved = self.task.state_dict(), state["task"]["tensors"]
        sources = torch.arange(self.num_envs) % len(state["progress"])
        tensors = dict(self._initial)
        for name, value in tensors.items():
            found = saved.get(name)
            if found is not None and found.shape != value.shape and found.shape[:1] == state["progress"].shape:
                found = found[sources.to(found.device)]
            if found is not None and found.shape == value.shape:
                tensors[name] = found
        self.task.load_state_dict({**own, "tensors": tensors})
        if self.randomizer is not None and "randomizer" in state:
            self.randomizer.begin_from(state["randomizer"])
        return self._begin()

    def close(self) -> None:
        """Frees the simulator."""
        self.sim.close()


def _action_space(task: Task, cfg: TaskConfig, name: str) -> ActionSpace:
    if task.choices is None:
        return Box(task.num_actions)
    counts = tuple(task.choices)
    if len(counts) != task.num_actions or not all(isinstance(count, int) and count > 1 for count in counts):
        raise TaskError(f"{name}.choices must be {task.num_actions} ints above 1, got {task.choices!r}")
    if cfg.randomize and not cfg.randomization_params.keys().isdisjoint(("actions", "latency")):
        raise ConfigError(
            f"task.randomization_params: {name} has discrete actions, which cannot be noisy or late here; try without"
            " actions and latency"
        )
    return MultiDiscrete(counts)
