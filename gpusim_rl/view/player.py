"""A policy back in its task: what the tools step to show a run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpusim_rl.env import Environment, Step, Task, VecEnv
from gpusim_rl.env.task import load_task_class, load_task_or_environment
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import Algorithm, Hidden, Policy, load_algorithm_class, make_policy
from gpusim_rl.run.checkpoint import load_training, must_fit
from gpusim_rl.run.run_dir import resolve_run
from gpusim_rl.settings import discover
from gpusim_rl.settings.checks import build_run
from gpusim_rl.settings.schema import RunConfig
from gpusim_rl.settings.simulators import SIMULATORS, default_simulator
from gpusim_rl.settings.trust import check_saved_settings
from gpusim_rl.sim import SimChoice, choose_sim
from gpusim_rl.spaces import MultiDiscrete

POLICIES = ("trained", "zero", "random")
NEEDED = ("config", "sim", "seed", "env", "obs_sizes", "num_actions", "policy", "iteration")


class Player:
    """Steps a task with a policy: whole episodes, the mean action, no exploration noise.

    Args:
        env: The envs; the policy acts on their device.
        seed: Of random actions.
        act: `trained`, `zero` or `random`.

    Attributes:
        env: The envs.
        obs: Observations to act on next.
        checkpoint: File that the policy came from; None without one.
        run_dir: Folder of the run; None without one.
        iteration: Iteration of the checkpoint; None without one.
        settings: Those of the run, plain values as this version names them; empty without a run.
    """

    def __init__(self, env: Environment, *, seed: int, act: str = "zero") -> None:
        self.env = env
        self.obs = env.reset()
        self.act = act
        self.checkpoint: Path | None = None
        self.run_dir: Path | None = None
        self.iteration: int | None = None
        self.settings: dict[str, Any] = {}
        self._written_ns = 0  # when the checkpoint was written
        self._policy: Policy | None = None
        self._hidden: Hidden = ()
        self._algorithm: tuple[type[Algorithm], RunConfig]
        dtype = torch.int64 if isinstance(env.action_space, MultiDiscrete) else torch.float32
        self._zero = torch.zeros(env.num_envs, env.num_actions, dtype=dtype, device=env.device)
        self._generator = torch.Generator(env.device).manual_seed(seed)

    @classmethod
    def open(
        cls,
        name: str,
        *,
        act: str = "trained",
        num_envs: int = 1,
        sim: str | None = None,
        plays_on: str | None = None,
        from_yaml: bool = False,
        compose: Callable[[list[str], str | None], dict[str, Any]] | None = None,
        trust: bool = False,
        config_dir: str | None = None,
        render_mode: str | None = None,
    ) -> Player:
        """Rebuilds the task of a run from what the run saved, and its policy.

        Args:
            name: A run folder, a checkpoint, or a task (its latest run). Where no policy is needed and the task has no
                run yet, the task is taken as its yaml has it.
            act: `trained`, `zero` or `random`.
            num_envs: Envs.
            sim: Simulator; None takes the one that the registry names for what trained the run (`plays_on`).
            plays_on: Takes its place there, for tasks on our simulators; envs of another library have none.
            from_yaml: Where no policy is needed, a task is as its yaml has it, whatever its runs were.
            compose: `gpusim_rl.settings.compose.compose`; None where only runs can be meant.
            trust: Import the classes that the run names, whatever they are.
            config_dir: A folder of the user's with more tasks (`-cd`), whose code is trusted.
            render_mode: Of envs of another library, which draw themselves: `rgb_array` for pictures, `human` for a
                window; None draws nothing.

        Raises:
            ConfigError: There is no such run, or it does not fit this version's task.
        """
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)  # tasks in the user's folder, as for train.py
        untrained = discover.tasks(config_dir) if compose is not None and act != "trained" else {}
        if compose is not None and name in untrained and (from_yaml or not Path("runs", name).exists()):
            return cls._untrained(compose([f"task={name}"], config_dir), act, num_envs, sim)
        run, file = resolve_run(name)
        written_ns = file.stat().st_mtime_ns  # before it is read: a newer one is not missed
        state = load_training(file, NEEDED)
        config = check_saved_settings(state["config"], file, trust=trust, config_dir=config_dir)
        task_class = load_task_or_environment(config["task"].get("_target_"))
        algorithm_class = load_algorithm_class(config["algo"].get("_target_"))
        cfg = build_run(config, task_class=task_class, algorithm_class=algorithm_class)
        if issubclass(task_class, Environment):
            if sim is not None:
                raise ConfigError(f"--sim={sim} has no effect on envs of another library")
            drawn = {} if render_mode is None else {"render_mode": render_mode}
            env_cfg = dataclasses.replace(cfg.env, kwargs={**cfg.env.kwargs, **drawn}, overlap=False)
            env: Environment = task_class.from_settings(env_cfg, num_envs=num_envs, seed=state["seed"])
        else:
            choice = _choose(sim or plays_on or SIMULATORS[state["sim"]].plays_on)
            env = _whole_episodes(task_class, cfg, choice, num_envs, state["seed"])
        player = cls(env, seed=state["seed"], act=act)
        player.run_dir, player.settings = run.path, config
        if act == "trained":
            player._algorithm = algorithm_class, cfg
            player._take(state, file, written_ns)
        with must_fit(file, f"task {player.name}"):
            player.obs = player.env.begin_from(state["env"])  # on the levels, say, that the training has reached
        return player

    @classmethod
    def _untrained(cls, config: dict[str, Any], act: str, num_envs: int, sim: str | None) -> Player:
        task_class = load_task_class(config["task"].get("_target_"))
        algorithm_class = load_algorithm_class(config["algo"].get("_target_"))
        cfg = build_run(config, task_class=task_class, algorithm_class=algorithm_class)
        choice = _choose(sim or default_simulator("cpu").name)
        return cls(_whole_episodes(task_class, cfg, choice, num_envs, seed=0), seed=0, act=act)

    def _take(self, state: Mapping[str, Any], file: Path, written_ns: int) -> None:
        with must_fit(file, f"task {self.name}"):
            for key, now in (("obs_sizes", self.env.obs_sizes), ("num_actions", self.env.num_actions)):
                if state[key] != now:
                    raise ConfigError(
                        f"{file} does not fit task {self.name} as it is now: {key} saved {state[key]}, now {now}."
                        " Try the version of the task that trained it (git.diff and env.json of the run tell which)"
                    )
            algorithm_class, cfg = self._algorithm
            policy = make_policy(algorithm_class, cfg, state["obs_sizes"], self.env.action_space, self.env.device)
            policy.load_state_dict(state["policy"])
            self._policy = policy.eval().requires_grad_(False)
            self._hidden = policy.initial_state(self.env.num_envs)
        self._written_ns = written_ns
        self.checkpoint, self.iteration = file, state["iteration"]

    def follow(self) -> bool:
        """Takes over the networks of a newer checkpoint in the same file; whether there was one."""
        if self.checkpoint is None:
            return False
        try:
            written_ns = self.checkpoint.stat().st_mtime_ns
        except OSError:  # the run was moved away: play on
            return False
        if written_ns == self._written_ns:
            return False
        self._take(load_training(self.checkpoint, NEEDED), self.checkpoint, written_ns)
        return True

    @torch.no_grad()
    def step(self) -> Step:
        """Acts for one control step in all envs."""
        step = self.env.step(self._action())
        self.obs = step.obs
        self._hidden = tuple(h.masked_fill(step.done[None, :, None], 0.0) for h in self._hidden)
        return step

    def _action(self) -> Tensor:
        if self._policy is not None:
            action, self._hidden = self._policy.act(self.obs, self._hidden, deterministic=True)
            return action
        if self.act == "zero":
            return self._zero
        space, action = self.env.action_space, torch.empty_like(self._zero)
        if isinstance(space, MultiDiscrete):
            for column, count in zip(action.unbind(dim=1), space.counts, strict=True):
                column.random_(count, generator=self._generator)
            return action
        limit = self.env.cfg.clip_actions if isinstance(self.env, VecEnv) else 1.0
        return action.uniform_(-limit, limit, generator=self._generator)

    @property
    def policy(self) -> Policy | None:
        """Networks of the checkpoint, on the device of the envs; None where none acts."""
        return self._policy

    @property
    def name(self) -> str:
        """What messages call the envs: the task."""
        return getattr(self.env, "name", type(self.env).__name__)

    def close(self) -> None:
        """Frees the simulator."""
        self.env.close()


def _whole_episodes(task_class: type[Task[Any]], cfg: RunConfig, choice: SimChoice, num_envs: int, seed: int) -> VecEnv:
    """The envs of a task, where all episodes begin at their start."""
    task_cfg = cfg.task.whole_episodes()
    return VecEnv.make(task_class, task_cfg, num_envs=num_envs, choice=choice, sim=cfg.sim, seed=seed)


def _choose(sim: str) -> SimChoice:
    """The simulator that is to show a run, on the device that suits it here."""
    on_cuda = "cuda" in SIMULATORS[sim].devices and torch.cuda.is_available()
    return choose_sim(sim, torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu"))
