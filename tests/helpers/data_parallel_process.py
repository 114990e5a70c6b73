"""Process of a data-parallel learner, fed by `record`: python data_parallel_process.py RANK SIZE FOLDER."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed

UPDATES = 3
ENVS = 16
PPO: dict[str, Any] = {"horizon": 8, "epochs": 3, "precision": "fp32", "network": {"hidden": [16]}}
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": PPO,
    "amp": PPO,
    "bc": {"horizon": 8, "gradient_steps": 12, "precision": "fp32", "network": {"hidden": [16]}},
    "sac": {
        "horizon": 4,
        "updates": 2,
        "batch_size": 32,
        "learning_starts": 32,
        "precision": "fp32",
        "replay": {"capacity": 1600},
        "network": {"hidden": [16], "critic_hidden": [16]},
    },
}


def identity(count: int, **_: Any) -> Tensor:
    """Replace `torch.randperm`, so that a minibatch of all envs joins those of each half."""
    return torch.arange(count)


def make_learner(name: str, num_envs: int, minibatches: int = 1, **together: Any) -> Any:
    """Build a learner with the same weights in every process."""
    from gpusim_rl.api import prepare
    from gpusim_rl.learn.algorithm import EnvSpec, LearnerContext
    from gpusim_rl.spaces import Box

    torch.manual_seed(0)
    settings, sizes, cpu = dict(SETTINGS[name]), {"policy": 4}, torch.device("cpu")
    samples = num_envs * settings["horizon"]
    if name in ("ppo", "amp"):
        settings["minibatch_size"] = samples // minibatches
    if name == "amp":  # all samples of the newest rollout, in every step
        settings["discriminator"] = {"batch_size": samples, "replay": samples, "replay_share": 1.0, "hidden": [16]}
        sizes |= {"style": 2, "reference": 2}
    env, context = EnvSpec(num_envs, sizes, Box(1), 500), LearnerContext(name, **together)
    with TemporaryDirectory() as folder:
        if name == "bc":
            from gpusim_rl.learn.demonstrations import save
            from helpers.demonstrated import random_demonstrations

            file = Path(folder, "shown.npz")
            save(file, random_demonstrations(env))
            settings |= {"demonstrations": {"file": str(file)}, "batch_size": 2 * num_envs}
        spec = prepare("Cartpole", algo=name, num_envs=num_envs, **{name: settings})
        learner: Any = spec.algorithm_class(spec.cfg.algorithm, env, context, device=cpu, seed=0, max_iterations=100)
    if name == "amp":
        style = learner.extensions["style"]
        style._random_rows = lambda number: torch.arange(number) % samples
        draw = style.replay.draw
        style.replay.draw = lambda unit: draw(torch.arange(len(unit)) / len(unit))
    return learner


def learned(learner: Any) -> dict[str, Tensor]:
    """Return the tensors that must agree between processes."""
    styles = [x.discriminator for name, x in getattr(learner, "extensions", {}).items() if name == "style"]
    of_style = {name: x for net in styles for name, x in net.state_dict(prefix="discriminator.").items()}
    return learner.policy.state_dict() | of_style


def memory_of(learner: Any) -> list[tuple[Tensor, int]]:
    """Return the tensors that a rollout writes, with their env dimension."""
    styles = [x for name, x in getattr(learner, "extensions", {}).items() if name == "style"]
    return [*learner.rollout.memory(), *((memory, 1) for style in styles for memory in style.features.groups.values())]


def share_of_draws(rank: int, size: int) -> Any:
    """Replace `torch.randint` by this process's part of a draw for all."""
    draw = torch.randint

    def drawn(high: int, shape: tuple[int, int], **more: Any) -> Tensor:
        return draw(high, (shape[0], shape[1] * size), **more).chunk(size, dim=1)[rank]

    return drawn


def rows(value: Any, part: slice) -> Any:
    """Return the rows of some envs, in nested tensors."""
    if isinstance(value, Tensor):
        return value[part].clone()
    if isinstance(value, Mapping):
        return {name: rows(item, part) for name, item in value.items()}
    if dataclasses.is_dataclass(value):
        return type(value)(*(rows(getattr(value, f.name), part) for f in dataclasses.fields(value)))  # type: ignore
    return value


def record(name: str, folder: Path, size: int, minibatches: int) -> Any:
    """Train alone on all envs; write what each of `size` processes would have seen."""
    from gpusim_rl import make_env

    learner = make_learner(name, ENVS, minibatches)
    task = {"_target_": "helpers.styled.Styled"} if name == "amp" else {}
    env = make_env("Cartpole", num_envs=ENVS, device="cpu", seed=1, task=task)
    obs = env.reset()
    drawn: list[Any] = []
    if name == "sac":
        draw = learner._draw
        learner._draw = lambda number: drawn.append(draw(number)) or drawn[-1]
    for number in range(UPDATES):
        learner.begin_rollout()
        steps = []
        for _ in range(learner.horizon):
            action = learner.act(obs)
            step = env.step(action)
            steps.append(({"policy": obs["policy"].clone()}, action.clone(), rows(step, slice(None))))
            learner.record(action, step)
            obs = step.obs
        memory = [(x.clone(), dim) for x, dim in memory_of(learner)] if name != "sac" else []
        learner.update()
        each = ENVS // size
        for rank in range(size):
            part = slice(rank * each, (rank + 1) * each)
            batch = slice(rank * 32 // size, (rank + 1) * 32 // size)
            halves = [
                dataclasses.replace(rows(x, batch), noise=x.noise[:, batch]) for x in (drawn[-1] if drawn else [])
            ]
            own = {
                "memory": [x.narrow(dim, part.start, each).clone() for x, dim in memory],
                "steps": [rows(list_item, part) for item in steps for list_item in item],
                "batches": halves,
            }
            torch.save(own, folder / f"{number}-{rank}.pt")
    env.close()
    return learner


def learn(rank: int, size: int, folder: Path, name: str, minibatches: int) -> None:
    """Train on the recording together with the others; write the policy."""
    from gpusim_rl.distributed.data_parallel import Processes

    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.randperm = identity  # type: ignore[assignment]
    learner = make_learner(name, ENVS // size, minibatches, collective=Processes())
    for number in range(UPDATES):
        own = torch.load(folder / f"{number}-{rank}.pt", weights_only=False)
        if name != "sac":
            for (tensor, _), saved in zip(memory_of(learner), own["memory"], strict=True):
                tensor.copy_(saved)
        else:
            for k in range(0, len(own["steps"]), 3):
                learner.acted_on, action, step = own["steps"][k : k + 3]
                learner.record(action, step)
            learner._draw = lambda _, batches=own["batches"]: batches
        with mock.patch.object(torch, "randint", share_of_draws(rank, size)):
            learner.update()
    torch.save(learned(learner), folder / f"policy-{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    learn(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
