"""A policy back in its task: what the tools step to show a run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpusim_rl import discover
from gpusim_rl.config import SimConfig, build_run
from gpusim_rl.env import Step, Task, TaskConfig, VecEnv
from gpusim_rl.env.task import load_task_class
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import Algorithm, Hidden, Policy, load_algorithm_class
from gpusim_rl.run.checkpoint import load_training, must_fit
from gpusim_rl.run.run_dir import resolve_run
from gpusim_rl.saved_run import of_this_version
from gpusim_rl.sim import SimChoice, choose_sim
from gpusim_rl.simulators import SIMULATORS, default_simulator
from gpusim_rl.spaces import Box
from gpusim_rl.trust import check_saved_settings

POLICIES = ("trained", "zero", "random")
NEEDED = ("config", "sim", "seed", "env", "obs_sizes", "num_actions", "policy", "iteration")


def load_policy(
    state: Mapping[str, Any], algorithm_class: type[Algorithm], settings: Any, device: torch.device
) -> Policy:
    """The policy of a checkpoint, for acting only: float32, no gradients, statistics as they are.

    Args:
        state: What `load_training` returned.
        algorithm_class: What trained it.
        settings: Those of the algorithm, from the checkpoint's own config.
        device: Where to act.
    """
    policy = algorithm_class.make_policy(settings, state["obs_sizes"], Box(state["num_actions"])).to(device)
    policy.load_state_dict(state["policy"])
    return policy.eval().requires_grad_(False)


class Player:
    """Steps a task with a policy: whole episodes, the mean action, no exploration noise.

    Args:
        task_class: The task.
        task_cfg: Its configuration.
        sim_cfg: Settings of the simulator.
        choice: The simulator and its device; the policy acts there too.
        num_envs: Envs.
        seed: Of the task's random numbers, and of random actions.
        act: `trained`, `zero` or `random`.

    Attributes:
        env: The envs.
        obs: Observations to act on next.
        checkpoint: File that the policy came from; None without one.
        run_dir: Folder of the run; None without one.
        iteration: Iteration of the checkpoint; None without one.
    """

    def __init__(
        self,
        task_class: type[Task[Any]],
        task_cfg: TaskConfig,
        sim_cfg: SimConfig,
        *,
        choice: SimChoice,
        num_envs: int,
        seed: int,
        act: str = "zero",
    ) -> None:
        whole = dataclasses.replace(task_cfg, randomize_episode_start=False)
        self.env = VecEnv.make(task_class, whole, num_envs=num_envs, choice=choice, sim=sim_cfg, seed=seed)
        self.obs = self.env.reset()
        self.act = act
        self.checkpoint: Path | None = None
        self.run_dir: Path | None = None
        self.iteration: int | None = None
        self._written_ns = 0  # when the checkpoint was written
        self._policy: Policy | None = None
        self._hidden: Hidden = ()
        self._algorithm: tuple[type[Algorithm], Any]
        self._zero = torch.zeros(num_envs, self.env.num_actions, device=choice.device)
        self._generator = torch.Generator(choice.device).manual_seed(seed)

    @classmethod
    def open(
        cls,
        name: str,
        *,
        act: str = "trained",
        num_envs: int = 1,
        sim: str | None = None,
        from_yaml: bool = False,
        compose: Callable[[list[str], str | None], dict[str, Any]] | None = None,
        trust: bool = False,
        config_dir: str | None = None,
    ) -> Player:
        """Rebuilds the task of a run from what the run saved, and its policy.

        Args:
            name: A run folder, a checkpoint, or a task (its latest run). Where no policy is needed and the task has no
                run yet, the task is taken as its yaml has it.
            act: `trained`, `zero` or `random`.
            num_envs: Envs.
            sim: Simulator; None takes the one that the registry names for what trained the run (`plays_on`).
            from_yaml: Where no policy is needed, a task is as its yaml has it, whatever its runs were.
            compose: `gpusim_rl.compose.compose`; None where only runs can be meant.
            trust: Import the classes that the run names, whatever they are.
            config_dir: A folder of the user's with more tasks (`-cd`), whose code is trusted.

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
        config = of_this_version(check_saved_settings(state["config"], file, trust=trust, config_dir=config_dir))
        task_class = load_task_class(config["task"].get("_target_"))
        algorithm_class = load_algorithm_class(config["algo"].get("_target_"))
        cfg = build_run(config, task_class=task_class, algorithm_class=algorithm_class)
        player = cls(
            task_class,
            cfg.task,
            cfg.sim,
            choice=_choose(sim or SIMULATORS[state["sim"]].plays_on),
            num_envs=num_envs,
            seed=state["seed"],
            act=act,
        )
        player.run_dir = run.path
        if act == "trained":
            player._algorithm = algorithm_class, cfg.algorithm
            player._take(state, file, written_ns)
        with must_fit(file, f"task {player.env.name}"):
            player.obs = player.env.begin_from(state["env"])  # on the levels, say, that the training has reached
        return player

    @classmethod
    def _untrained(cls, config: dict[str, Any], act: str, num_envs: int, sim: str | None) -> Player:
        task_class = load_task_class(config["task"].get("_target_"))
        algorithm_class = load_algorithm_class(config["algo"].get("_target_"))
        cfg = build_run(config, task_class=task_class, algorithm_class=algorithm_class)
        choice = _choose(sim or default_simulator("cpu").name)
        return cls(task_class, cfg.task, cfg.sim, choice=choice, num_envs=num_envs, seed=0, act=act)

    def _take(self, state: Mapping[str, Any], file: Path, written_ns: int) -> None:
        with must_fit(file, f"task {self.env.name}"):
            for key, now in (("obs_sizes", self.env.obs_sizes), ("num_actions", self.env.num_actions)):
                if state[key] != now:
                    raise ConfigError(
                        f"{file} does not fit task {self.env.name} as it is now: {key} saved {state[key]}, now {now}."
                        " Try the version of the task that trained it (git.diff and env.json of the run tell which)"
                    )
            self._policy = load_policy(state, *self._algorithm, self.env.device)
        self._hidden = self._policy.initial_state(self.env.num_envs)
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
        if self.act == "random":
            limit = self.env.cfg.clip_actions
            return torch.empty_like(self._zero).uniform_(-limit, limit, generator=self._generator)
        return self._zero

    def close(self) -> None:
        """Frees the simulator."""
        self.env.close()


def _choose(sim: str) -> SimChoice:
    """The simulator that is to show a run, on the device that suits it here."""
    on_cuda = "cuda" in SIMULATORS[sim].devices and torch.cuda.is_available()
    return choose_sim(sim, torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu"))
