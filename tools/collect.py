"""Record demonstrations of a policy or a script.

gpusim-rl collect HalfCheetah --episodes 20              20 episodes of the latest run, or of the demo
gpusim-rl collect Ant --explore                          with exploration noise
gpusim-rl collect my_script.py task=FrankaCubeStack --keep success     successful episodes of a script
gpusim-rl collect my_script.py --actor FrankaCubeStack --append        DAgger: the script labels a policy's steps
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import importlib.util
import math
import shlex
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gpusim_rl.errors import ConfigError, friendly_errors, say
from gpusim_rl.files import paths
from gpusim_rl.files.provenance import git_state
from gpusim_rl.machine.hardware import import_torch
from gpusim_rl.options import Parser, positive
from gpusim_rl.view.arguments import check_out

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from gpusim_rl.env import VecEnv
    from gpusim_rl.learn.algorithm import EnvSpec
    from gpusim_rl.learn.demonstrations import Demonstrations
    from gpusim_rl.view.player import Player

EPISODES, MOST_ENVS, STEPS_ENVS = 20, 64, 16
SETTINGS = "task=", "task.", "sim=", "sim.", "device="  # prefixes of settings that a script's envs accept
SCRIPT = "A script must define controller(task), which returns a function that computes actions"


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        collect(parse(argv))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("collect", __doc__)
    parser.option("source", "run folder, checkpoint, task (its latest run, or its demo), or script.py", "Arguments")
    parser.option("settings", "of a script's task")
    length = parser.add_mutually_exclusive_group()
    parser.option("--episodes", "whole episodes", "Episodes", EPISODES, type=positive, among=length)
    parser.option("--steps", "per env; the last episodes are truncated", among=length)
    parser.option("--keep", "keep episodes with success or at least this return", "Episodes", metavar="success|RETURN")
    parser.option("--explore", "sample the actions", "Episodes", action="store_true")
    parser.option("--actor", "policy that acts while the script's actions are recorded", "Episodes", metavar="RUN")
    parser.option("--num-envs", note=f"one per episode, up to {MOST_ENVS}; {STEPS_ENVS} with --steps")
    parser.option("--seed", default=None, note="number of episodes in the file")
    parser.option("--sim", note="mujoco")
    parser.option("--out", ".npz", default=Path("demonstrations.npz"))
    present = parser.add_mutually_exclusive_group()
    parser.option("--overwrite", among=present)
    parser.option("--append", "add the episodes to an existing file", "Output", action="store_true", among=present)
    parser.options("--trust", "--config-dir")
    args = parser.parse_intermixed_args(argv)
    if args.steps is None and args.episodes is None:
        args.episodes = EPISODES
    if args.num_envs is None:
        args.num_envs = STEPS_ENVS if args.episodes is None else min(args.episodes, MOST_ENVS)
    return args


def collect(args: argparse.Namespace) -> Demonstrations:
    """Record episodes, filter them by `--keep`, write them and print a summary; return the file's demonstrations."""
    check_out(args.out, ".npz", overwrite=args.overwrite or args.append)
    if args.keep not in (None, "success"):
        try:
            args.keep = float(args.keep)
        except ValueError:
            raise ConfigError(key="--keep", expected="'success' or a minimum return", got=args.keep) from None
    import_torch()
    import torch

    from gpusim_rl.learn import demonstrations

    scripted = args.source.endswith(".py")
    if scripted and not Path(args.source).is_file():
        raise ConfigError("no such script", key=args.source)
    if args.actor is not None and not scripted:
        raise ConfigError(key=f"--actor {args.actor}", expected="a script to record", got=args.source)
    if args.actor is not None and args.keep is not None:
        problem = "incompatible with --actor, where failed episodes are the most useful"
        raise ConfigError(problem, key=f"--keep {args.keep}", hint="Try without --keep")
    before = demonstrations.read(args.out)[0] if args.append and args.out.exists() else None
    if args.seed is None:
        args.seed = 0 if before is None else before.episodes  # so that each `--append` adds different episodes
    torch.manual_seed(args.seed)  # for sampled actions
    run = args.actor if scripted else args.source
    with closing(open_script_envs(args) if run is None else open_run(args, run)) as player:
        env = plain_envs(player)
        if before is not None:
            demonstrations.check_fits(before, str(args.out), spec_of(env), env.obs_sizes)
        act = script_of(args.source, env) if scripted else player.choose
        actor = None if args.actor is None else player.choose
        episodes = record(player, act, actor, episodes=args.episodes, steps=args.steps, name=args.source)
        kept = [episode for episode in episodes if keeps(args.keep, episode, env.name)]
        if not kept:
            best = max(episode.reward for episode in episodes)
            raise ConfigError(f"none of {len(episodes)} episodes passed --keep; the best return is {best:.4g}")
        new = joined(kept, env, executed=actor is None)
    try:
        shown = new if before is None else demonstrations.concatenate(before, new)
        demonstrations.save(args.out, shown)
    except ConfigError as error:
        raise error.within(str(args.out)) from None
    except OSError as error:
        raise ConfigError(f"cannot write {args.out}: {error.strerror or error}") from None
    success = [episode.success for episode in episodes if not math.isnan(episode.success)]
    size = f"{args.out.stat().st_size / 1e6:.1f} MB"
    say(
        f"{args.out}: {len(kept)} episodes, {len(new.reward)} control steps,"
        f" mean return {sum(episode.reward for episode in kept) / len(kept):.5g}, "
        + (size if before is None else f"added to {before.episodes}: {len(shown.reward)} control steps, {size}")
    )
    of_all = f"success {sum(value >= 0.5 for value in success) / len(success):.1%}" if success else ""
    if of_all or len(kept) < len(episodes):
        mean = sum(episode.reward for episode in episodes) / len(episodes)
        say(f"all {len(episodes)} recorded episodes: mean return {mean:.5g}{f', {of_all}' if of_all else ''}")
    return shown


def open_run(args: argparse.Namespace, run: str) -> Player:
    """Open a player of a run, or of the demo for a task without runs."""
    from gpusim_rl.view.player import Player

    if args.settings:
        raise ConfigError("a run's settings cannot be changed", key=args.settings[0], hint="Remove the settings")
    demo = paths.demos_dir() / run
    if demo.is_dir() and not Path("runs", run).exists() and not Path(run).exists():
        run = str(demo)
    options: dict[str, Any] = {"num_envs": args.num_envs, "sim": args.sim, "changes": {"seed": args.seed}}
    run = str(paths.find_checkpoint(run).file)
    player = Player.open(run, trust=args.trust, config_dir=args.config_dir, **options)
    player.explores = args.explore
    say(f"{player.checkpoint}, iteration {player.iteration}")
    return player


def open_script_envs(args: argparse.Namespace) -> Player:
    """Build a player of the envs for a script, with settings from the command line."""
    from gpusim_rl.api import load_spec
    from gpusim_rl.env import Task, VecEnv
    from gpusim_rl.run.devices import choose_devices
    from gpusim_rl.settings.compose import compose
    from gpusim_rl.settings.discover import import_from_current_folder
    from gpusim_rl.view.player import Player

    if args.explore:
        raise ConfigError("not supported with a script", key="--explore")
    if not any(setting.startswith("task=") for setting in args.settings):
        raise ConfigError("no task given", key=args.source, hint=f"Try {shlex.quote(args.source)} task=<task>")
    for setting in args.settings:
        if not setting.startswith(SETTINGS):
            raise ConfigError(key=setting, expected="a setting of task, sim or device", hint="Try --num-envs")
    import_from_current_folder()
    sim = [] if args.sim is None else [f"sim={args.sim}"]
    spec = load_spec(compose([*args.settings, *sim], args.config_dir), [])
    if not issubclass(spec.task_class, Task):
        raise ConfigError("envs of other libraries cannot be recorded")
    _, choice = choose_devices(spec.cfg)
    task_cfg = spec.cfg.task.whole_episodes()
    env = VecEnv.make(
        spec.task_class, task_cfg, num_envs=args.num_envs, choice=choice, sim=spec.cfg.sim, seed=args.seed
    )
    return Player(env, seed=args.seed)


def plain_envs(player: Player) -> VecEnv:
    """Return the envs; raise ConfigError unless they run one of our tasks without images."""
    from gpusim_rl.env import VecEnv

    if not isinstance(player.env, VecEnv):
        raise ConfigError("envs of other libraries cannot be recorded")
    if player.env.images:
        raise ConfigError("tasks with images cannot be recorded", key=player.name)
    return player.env


def script_of(name: str, env: VecEnv) -> Callable[[], Tensor]:
    """Run the user's script; return the function that its `controller` returns."""
    from gpusim_rl.env import Task

    file = Path(name)
    spec = importlib.util.spec_from_file_location(f"script_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look the module up by name
    sys.path.append(str(file.resolve().parent))  # Python does this for scripts, but at the start
    spec.loader.exec_module(module)
    controller: Any = getattr(module, "controller", None)
    if not callable(controller):
        raise ConfigError("no function named controller", key=name, hint=SCRIPT)
    wanted = getattr(controller, "__annotations__", {}).get("task")
    wanted = getattr(module, wanted, None) if isinstance(wanted, str) else wanted
    if isinstance(wanted, type) and issubclass(wanted, Task) and not isinstance(env.task, wanted):
        raise ConfigError(f"the script is for {wanted.__name__}, but the task is {env.name}", key=name)
    act: Any = controller(env.task)
    if not callable(act):
        raise ConfigError(f"controller(task) returned {type(act).__name__}, not a function", key=name, hint=SCRIPT)
    return cast("Callable[[], Tensor]", act)


@dataclass(frozen=True, slots=True)
class Episode:
    """Recorded episode: observations by group [steps, size], final observations, actions, rewards and end flags."""

    obs: dict[str, np.ndarray]
    final_obs: dict[str, np.ndarray]
    action: np.ndarray
    rewards: np.ndarray
    terminated: bool
    truncated: bool
    diverged: bool
    success: float
    """`success` in the last step; NaN if not logged."""

    @property
    def reward(self) -> float:
        """Episode return: sum of the rewards."""
        return float(self.rewards.sum())


def record(
    player: Player,
    act: Callable[[], Tensor],
    actor: Callable[[], Tensor] | None = None,
    *,
    episodes: int | None,
    steps: int | None,
    name: str,
) -> list[Episode]:
    """Step the envs and return their episodes; `episodes` takes equally many per env, to avoid a bias to short ones.

    Args:
        player: Envs at the start of an episode.
        act: Function that returns actions [num_envs, actions] to record.
        actor: Function that returns the actions to execute; None: `act`.
        episodes: Number of whole episodes; None: record `steps` control steps.
        steps: Control steps of each env; the last episodes are truncated.
        name: Source of the actions, for messages.
    """
    import numpy as np
    import torch
    from torch.utils._pytree import tree_map

    from gpusim_rl.spaces import Box

    env: Any = player.env
    steps = steps or 0
    expected, rows, count = list(env.task.actions.shape), [], torch.zeros(env.num_envs, dtype=torch.int64)
    rounds = None if episodes is None else -(-episodes // env.num_envs)
    nothing = torch.full((env.num_envs,), torch.nan, device=env.device)
    with torch.no_grad():
        while len(rows) < steps if rounds is None else bool((count < rounds).any()):
            obs = {group: value.clone() for group, value in player.obs.items()}
            action = act()
            if not isinstance(action, torch.Tensor) or list(action.shape) != expected:
                got = f"shape {list(action.shape)}" if isinstance(action, torch.Tensor) else type(action).__name__
                raise ConfigError(f"returned {got} as actions, expected a tensor of shape {expected}", key=name)
            action = action.to(env.task.actions).clone()
            step = player.step(action if actor is None else actor())
            if isinstance(env.action_space, Box):
                limit = env.cfg.clip_actions
                action = torch.where(action.isfinite(), action.clamp(-limit, limit), action)
            flags = step.terminated, step.truncated, step.diverged
            row = (obs, step.final_obs, action, step.reward, *flags, step.stats.get("success", nothing))
            rows.append(tree_map(lambda value: value.to("cpu", copy=True).numpy(), row))
            count += step.done.cpu()
    joined_rows: Any = tree_map(lambda *x: np.stack(x), *rows)
    obs, final_obs, action, reward, terminated, truncated, diverged, success = joined_rows
    found = []
    for n in range(env.num_envs):
        ends = np.flatnonzero((terminated | truncated | diverged)[:, n]).tolist()
        if rounds is None and ends[-1:] != [steps - 1]:
            truncated[-1, n] = True
            ends.append(steps - 1)
        start = 0
        for number, end in enumerate(ends):
            part = slice(start, end + 1)
            flags = terminated[end, n], truncated[end, n], diverged[end, n]
            before = {group: value[part, n] for group, value in obs.items()}
            after = {group: value[end, n] for group, value in final_obs.items()}
            episode = Episode(before, after, action[part, n], reward[part, n], *flags, float(success[end, n]))
            found.append((number, n, episode))
            start = end + 1
    found.sort(key=lambda item: item[:2])
    return [episode for *_, episode in found][:episodes]


def keeps(keep: str | float | None, episode: Episode, task: str) -> bool:
    """Return whether `--keep` selects an episode."""
    if keep is None:
        return True
    if isinstance(keep, float):
        return episode.reward >= keep
    if math.isnan(episode.success) and not episode.diverged:
        problem = f"{task} does not log `success` at the end of episodes"
        raise ConfigError(problem, key="--keep success", hint="Try --keep <return>")
    return episode.success >= 0.5


def spec_of(env: VecEnv) -> EnvSpec:
    """Return the env properties that all demonstrations in a file must share."""
    from gpusim_rl.env.observations import number_names
    from gpusim_rl.learn.algorithm import EnvSpec

    names = number_names(env.obs_sizes, env.obs_terms)
    spaces = env.num_envs, env.obs_sizes, env.action_space
    return EnvSpec(*spaces, env.max_episode_length, task=env.name, dt=env.task.dt, obs_names=names)


def joined(episodes: list[Episode], env: VecEnv, *, executed: bool) -> Demonstrations:
    """Concatenate episodes into `Demonstrations`, and add the env's metadata."""
    import numpy as np

    from gpusim_rl.learn.demonstrations import FLAGS, Demonstrations

    last = np.cumsum([len(episode.rewards) for episode in episodes]) - 1
    flags = {flag: np.zeros(last[-1] + 1, dtype=bool) for flag in FLAGS}
    for flag, values in flags.items():
        values[last] = [getattr(episode, flag) for episode in episodes]
    names = {group: np.array(of_numbers) for group, of_numbers in spec_of(env).obs_names.items()}
    state, _ = git_state()
    return Demonstrations(
        task=env.name,
        commit="" if state is None else state["sha"],
        dt=env.task.dt,
        episode_length=env.max_episode_length,
        num_envs=env.num_envs,
        executed=executed,
        obs={group: np.concatenate([episode.obs[group] for episode in episodes]) for group in names},
        final_obs={group: np.stack([episode.final_obs[group] for episode in episodes]) for group in names},
        obs_names=names,
        action=np.concatenate([episode.action for episode in episodes]),
        action_names=np.array([f"action[{number}]" for number in range(env.num_actions)]),
        reward=np.concatenate([episode.rewards for episode in episodes]),
        **flags,
    )


if __name__ == "__main__":
    sys.exit(main())
