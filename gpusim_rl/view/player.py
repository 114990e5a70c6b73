"""Player for a trained policy in its checkpoint's task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpusim_rl.api import load_spec, prepare
from gpusim_rl.env import Environment, Step, Task, VecEnv
from gpusim_rl.env.encoded_env import EncodedEnv
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.checkpoint_file import load
from gpusim_rl.files.paths import Checkpoint
from gpusim_rl.learn.algorithm import Hidden, Policy, make_policy
from gpusim_rl.run.checkpoint import check_spaces, check_training, must_fit
from gpusim_rl.run.make_env import evaluation_seed, observed
from gpusim_rl.run.run_dir import resolve_run
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.settings.discover import import_from_current_folder, tasks
from gpusim_rl.settings.simulators import SIMULATORS, default_simulator
from gpusim_rl.settings.trust import check_saved_settings
from gpusim_rl.sim import choose_sim
from gpusim_rl.spaces import MultiDiscrete

NEEDED = ("config", "sim", "seed", "env", "obs_sizes", "num_actions", "policy", "iteration")


class Player:
    """Player for whole episodes: the policy's deterministic actions (sampled if `explores`), or zero or random ones."""

    def __init__(self, env: Environment, *, seed: int, act: str = "zero") -> None:
        self.observed = env  # with the policy's observations
        self.env = env.unwrapped  # for rendering
        self.obs = env.reset()
        self.act = act
        self.explores = False
        self.policy: Policy | None = None  # on the envs' device
        self.checkpoint: Path | None = None
        self.iteration: int | None = None  # of the checkpoint
        self.run_dir: Path | None = None
        self.spec: RunSpec  # of the run; unset without one
        self._progress: dict[str, Any] | None = None  # training progress, such as curriculum levels, for new episodes
        self._written_ns = 0  # modification time of the checkpoint
        self._hidden: Hidden = ()
        self._zero = _zero_action(env)
        self._generator = torch.Generator(env.device).manual_seed(seed)

    @classmethod
    def open(
        cls,
        name: str,
        *,
        act: str = "trained",
        num_envs: int = 1,
        sim: str | None = None,
        replay_sim: str | None = None,
        from_yaml: bool = False,
        trust: bool = False,
        config_dir: str | None = None,
        render_mode: str | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Player:
        """Rebuild a run's task and policy from its saved settings.

        `name` is a run folder, a checkpoint, or a task (its latest run; unless `act` is `trained`, its yaml if it has
        no run or `from_yaml` is set). `act` is `trained`, `zero` or `random`. The simulator is `sim`, else `replay_sim`
        (not for envs of another library), else the registry's default. `trust` allows any class in the run's settings;
        `config_dir` is the trusted `-cd` folder; `render_mode` is for envs of another library; `changes` are overrides
        by full key. Raise ConfigError if the run does not exist, or does not match this version's task.
        """
        import_from_current_folder()
        if act != "trained" and name in tasks(config_dir) and (from_yaml or not Path("runs", name).exists()):
            spec = prepare(name, config_dir=config_dir)
            return cls(whole_episodes(spec, sim or default_simulator("cpu").name, num_envs, seed=0), seed=0, act=act)
        run, file = resolve_run(name)
        written_ns = file.stat().st_mtime_ns  # read first, so that a newer file is noticed
        state = check_training(load(file), file, NEEDED)
        config = check_saved_settings(state["config"], file, trust=trust, config_dir=config_dir)
        for key, value in {"seed": state["seed"], **(changes or {})}.items():
            section, _, last = key.rpartition(".")
            (config[section] if section else config)[last] = value
        spec = load_spec(config, [], Checkpoint(file, run.path))
        if not issubclass(spec.task_class, Environment):
            name = sim or replay_sim or SIMULATORS[state["sim"]].replay_sim
            device = (spec.cfg.sim_device or spec.cfg.device) if name == state["sim"] else "auto"
            env: Environment = whole_episodes(spec, name, num_envs, spec.cfg.seed, device)
        elif sim is None:
            drawn = {} if render_mode is None else {"render_mode": render_mode}
            env_cfg = dataclasses.replace(spec.cfg.env, kwargs={**spec.cfg.env.kwargs, **drawn})
            seed = evaluation_seed(spec.cfg.seed)
            env = spec.task_class.from_settings(env_cfg, num_envs=num_envs, seed=seed, device=torch.device("cpu"))
        else:
            raise ConfigError("has no effect on envs of another library", key=f"--sim={sim}")
        player = cls(observed(env, spec, env.device), seed=spec.cfg.seed, act=act)
        player.run_dir, player._progress, player.spec = run.path, state["env"], spec
        if act == "trained":
            player._take(written_ns, state, file)
        with must_fit(file, f"task {player.name}"):
            player.restart()
        return player

    def _take(self, written_ns: int, state: Mapping[str, Any], file: Path) -> None:
        with must_fit(file, f"task {self.name}"):
            env = self.observed
            check_spaces(state, env)
            cls, cfg = self.spec.algorithm_class, self.spec.cfg
            policy = make_policy(cls, cfg, env.obs_sizes, env.action_space, env.device, env.images)
            policy.load_state_dict(state["policy"])
            self.policy = policy.eval().requires_grad_(False)
            self._hidden = policy.initial_state(env.num_envs)
        self._written_ns, self._progress = written_ns, state["env"]
        self.checkpoint, self.iteration = file, state["iteration"]

    def follow(self) -> bool:
        """Reload the checkpoint if its file has changed; return whether it has."""
        with suppress(OSError):  # the run may be moved
            if (file := self.checkpoint) is not None and file.stat().st_mtime_ns != self._written_ns:
                self.take(file)
                return True
        return False

    def take(self, file: Path) -> None:
        """Load another checkpoint of the run; if damaged or unsuitable, keep the old one and raise ConfigError."""
        self._take(file.stat().st_mtime_ns, check_training(load(file), file, NEEDED), file)  # read the time first

    def restart(self) -> None:
        """Begin new episodes in all envs, with curricula (such as terrain levels) where training left them."""
        self.obs = self.observed.reset() if self._progress is None else self.observed.begin_from(self._progress)
        self._hidden = tuple(torch.zeros_like(hidden) for hidden in self._hidden)

    @torch.no_grad()
    def step(self, action: Tensor | None = None) -> Step:
        """Step all envs once, with the given actions or the policy's."""
        step = self.observed.step(self.choose() if action is None else action)
        self.obs = step.obs
        self._hidden = tuple(h.masked_fill(step.done[None, :, None], 0.0) for h in self._hidden)
        return step

    @torch.no_grad()
    def choose(self) -> Tensor:
        """Return the next actions; call once per step, since recurrent policies update their state."""
        if self.policy is not None and self.act == "trained":
            action, self._hidden = self.policy.act(self.obs, self._hidden, deterministic=not self.explores)
            return action
        return self._zero if self.act == "zero" else random_action(self.env, self._generator)

    @property
    def images(self) -> dict[str, Tensor]:
        """Next input images of the policy or its frozen encoder, uint8 [num_envs, height, width, channels]."""
        seen = self.observed.seen if isinstance(self.observed, EncodedEnv) else self.obs
        return {group: seen[group] for group in sorted(self.env.images)}

    @property
    def name(self) -> str:
        """Name of the task, for messages."""
        return getattr(self.env, "name", type(self.env).__name__)

    def close(self) -> None:
        """Close the simulator."""
        self.env.close()


def random_action(env: Environment, generator: torch.Generator) -> Tensor:
    """Return random actions, [num_envs, num_actions], uniform within the action limits or over the discrete options."""
    action = _zero_action(env)
    if isinstance(env.action_space, MultiDiscrete):
        for column, count in zip(action.unbind(dim=1), env.action_space.counts, strict=True):
            column.random_(count, generator=generator)
        return action
    limit = env.cfg.clip_actions if isinstance(env, VecEnv) else 1.0
    return action.uniform_(-limit, limit, generator=generator)


def _zero_action(env: Environment) -> Tensor:
    dtype = torch.int64 if isinstance(env.action_space, MultiDiscrete) else torch.float32
    return torch.zeros(env.num_envs, env.num_actions, dtype=dtype, device=env.device)


def whole_episodes(spec: RunSpec, sim: str, num_envs: int, seed: int, on: str = "auto") -> VecEnv:
    """Build a task's envs, on device `on` if available, for whole episodes from normal resets."""
    device, number = torch.device("cpu"), on.removeprefix("cuda:")
    if on != "cpu" and "cuda" in SIMULATORS[sim].devices and torch.cuda.is_available():
        here = number.isdecimal() and int(number) < torch.cuda.device_count()
        device = torch.device("cuda", int(number) if here else torch.cuda.current_device())
    task_cfg, choice = spec.cfg.task.whole_episodes(), choose_sim(sim, device)
    assert issubclass(spec.task_class, Task)
    return VecEnv.make(spec.task_class, task_cfg, num_envs=num_envs, choice=choice, sim=spec.cfg.sim, seed=seed)
