"""Checks of Isaac Lab and mjlab envs, run by their Python, which has no pytest."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpusim_rl.api import prepare
from gpusim_rl.connect.tensor_envs import TensorEnvs
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.env.environment import Step
from gpusim_rl.errors import ConfigError, say

OURS = "gpusim_rl/connect/"


def run(checks: dict[str, Callable[[], None]]) -> None:
    """Run the checks named on the command line."""
    for name in sys.argv[1:]:
        try:
            checks[name]()
        except Exception:
            traceback.print_exc()
            raise SystemExit(f"{name} failed") from None
        say(f"{name} holds")


def message_of(call: Callable[[], Any]) -> str:
    """Return the message of the ConfigError that a call raises."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    raise AssertionError("no error")


class _HostReads(TorchDispatchMode):
    """Recorder of operations by which our lines sync."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if any(op in name for op in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "index.Tensor")):
            self.note(name)
        return func(*args, **(kwargs or {}))

    def note(self, name: str) -> None:
        frame = sys._getframe(1)
        while frame and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
            frame = frame.f_back
        if frame and OURS in frame.f_code.co_filename:
            self.seen.append(name)


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Yield the host reads of our lines in the block; on a CPU the same calls are made."""
    mode, kept = _HostReads(), {name: getattr(torch.Tensor, name) for name in ("cpu", "tolist", "numpy", "item")}

    def noting(name: str) -> Callable[..., Any]:
        def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            mode.note(name)
            return kept[name](self, *args, **kwargs)

        return call

    for name in kept:
        setattr(torch.Tensor, name, noting(name))
    try:
        with mode:
            yield mode.seen
    finally:
        for name, method in kept.items():
            setattr(torch.Tensor, name, method)


def seconds_per_call(call: Callable[[], Any], count: int = 200) -> float:
    """Return the fastest call's time, as other load only slows calls down."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def check_own_time(env: TensorEnvs) -> None:
    """Check that the adapter takes less than 3 % of the library's control step."""
    action, library = torch.zeros(env.num_envs, env.num_actions), env._envs
    env.reset()
    theirs = seconds_per_call(lambda: library.step(action), count=20)
    env.reset()
    result = library.step(action)
    for ended in result[2:4]:
        ended.zero_()
    library.step = lambda action: result
    try:
        ours = seconds_per_call(lambda: env.step(action))
    finally:
        del library.step
    say(f"adapter {1e6 * ours:.0f} us, library {1e6 * theirs:.0f} us, {100 * ours / theirs:.2f} %")
    assert ours < 0.03 * theirs, (ours, theirs)
    env.reset()


def check_value_of_time_out(task: str, limit: int, **env: Any) -> None:
    """With reward 1 and no end but the time limit, V = 1 / (1 - gamma), also at the limit."""
    kept: list[Step] = []
    step = TensorEnvs.step

    def keep(self: TensorEnvs, action: torch.Tensor) -> Step:
        kept[:] = [*kept[-limit:], step(self, action)]
        return kept[-1]

    TensorEnvs.step = keep
    ppo = {"gamma": 0.9, "horizon": 16, "minibatch_size": 64, "network": {"hidden": [32]}}
    log = {"console": "quiet"}
    trainer = make_trainer(prepare(task, env=env, num_envs=8, max_iterations=150, device="cpu", ppo=ppo, log=log))
    row = trainer.train()
    assert row["episode/length"] == limit, row
    policy = trainer.algorithm.policy
    values = []
    for done in kept:
        if bool(done.done.any()):
            assert bool(done.truncated.all()), done
            assert not bool(done.terminated.any()), done
            last = {group: value.to(trainer.start.device) for group, value in done.final_obs.items()}
            with torch.no_grad():
                values.append(policy.denormalize_value(policy.value(last, policy.initial_state(8))))
    value = torch.stack(values)
    say(f"value of a time-out: {float(value.mean()):.2f}, expected {1 / (1 - 0.9):.2f}")
    # If the limit counted as termination, it would be 0, and 5.7 at the start of an episode.
    assert abs(float(value.mean()) - 10.0) < 0.5, value
    assert abs(row["value/mean_return"] - 10.0) < 0.2, row


def settings_of(task: str, **env: Any) -> Any:
    return prepare(task, env=env, num_envs=4, device="cpu").cfg.env
