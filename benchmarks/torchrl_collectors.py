"""Frames per second of TorchRL's collectors, for benchmarks/actors.py (`pip install torchrl`); prints one line of json.

    python benchmarks/torchrl_collectors.py sync 4 --wait-ms 10

Workers collect with a policy of the same size, in an env that sleeps in every step. Nothing is learned, and the weights
stay as they are.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from typing import Any

from actor_envs import ACTIONS, EPISODE, OBS, TimedEnv


def make_env(wait_ms: float, spin_ms: float) -> Any:
    """One env, in TorchRL's interface."""
    from gymnasium.wrappers import TimeLimit
    from torchrl.envs import GymWrapper  # type: ignore[reportMissingImports]

    return GymWrapper(TimeLimit(TimedEnv(wait_ms, spin_ms), EPISODE))


def make_policy(hidden: list[int]) -> Any:
    """A Gaussian policy that records the log-probabilities of its actions, as an actor of ours does."""
    from tensordict.nn import TensorDictModule
    from tensordict.nn.distributions import NormalParamExtractor
    from torch import nn
    from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor  # type: ignore[reportMissingImports]

    net = nn.Sequential(
        MLP(in_features=OBS, out_features=2 * ACTIONS, num_cells=hidden, activation_class=nn.ELU),
        NormalParamExtractor(),
    )
    module = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        module, in_keys=["loc", "scale"], distribution_class=IndependentNormal, return_log_prob=True
    )


def main() -> None:
    """Collects for some seconds behind the warm-up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=("sync", "async"))
    parser.add_argument("workers", type=int)
    parser.add_argument("--wait-ms", type=float, default=0.0)
    parser.add_argument("--spin-ms", type=float, default=0.0)
    parser.add_argument("--horizon", type=int, default=32, help="frames of a worker in a batch")
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 64])
    parser.add_argument("--warm-up", type=float, default=2.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=6.0)
    args = parser.parse_args()

    import torch
    from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector  # type: ignore[reportMissingImports]

    torch.set_num_threads(1)
    collector = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}[args.kind](
        [functools.partial(make_env, args.wait_ms, args.spin_ms)] * args.workers,
        make_policy(args.hidden),
        frames_per_batch=args.horizon * (args.workers if args.kind == "sync" else 1),  # async: a batch is of one worker
        total_frames=-1,
        device="cpu",
    )
    batches = iter(collector)
    next(batches)
    since = began = time.monotonic()
    while since - began < args.warm_up:
        next(batches)
        since = time.monotonic()
    frames, now = 0, since
    while now - since < args.seconds:
        frames += next(batches).numel()
        now = time.monotonic()
    print(json.dumps({"steps_per_s": frames / (now - since)}))
    collector.shutdown()


if __name__ == "__main__":
    sys.exit(main())
