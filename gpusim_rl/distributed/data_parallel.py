"""Data parallelism under torchrun: each process has envs of its own, and all learn one policy.

torchrun --nproc-per-node=4 train.py task=Ant multi_gpu=true
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[reportPrivateImportUsage]

from gpusim_rl.distributed.heartbeat import Heartbeat
from gpusim_rl.errors import ConfigError, say
from gpusim_rl.learn.collective import ALONE, Collective
from gpusim_rl.run.checkpoint import structural_difference
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.settings.schema import RunConfig, declarations

PATIENCE = timedelta(minutes=10)
"""Time that a process waits for others that live: one of them may compile, or write a large checkpoint."""

RUN_DIR = "gpusim_rl/run_dir"
"""Key of the run folder in the store of torchrun, which outlives a restart of the processes."""


class Processes(Collective):
    """The processes that torchrun has started.

    A sum is of one buffer, whatever it consists of: by NCCL on CUDA, by gloo on the CPU. What the host must know goes
    by gloo.
    """

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        on_cuda = distributed.get_backend() == "nccl"
        self.summing_s = None if on_cuda else 0.0
        self._host: Any = distributed.new_group(backend="gloo", timeout=PATIENCE) if on_cuda else None
        self._launch: Callable[[Callable[[], None]], None] = _now

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the sums over all processes, tensor by tensor."""
        if not tensors:
            return []
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        began = time.perf_counter()
        self._launch(lambda: _add_up(flat))
        if self.summing_s is not None:
            self.summing_s += time.perf_counter() - began
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    @contextmanager
    def launches_apart(self, launch_between: Callable[[Callable[[], None]], None]) -> Iterator[None]:
        """Hands over what takes a sum, so that it is launched between two CUDA graphs."""
        self._launch = launch_between
        try:
            yield
        finally:
            self._launch = _now

    def share(self, value: Any) -> Any:
        """Returns the value that the first process has."""
        box = [value]
        distributed.broadcast_object_list(box, src=0, group=self._host)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes, in the first one."""
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        distributed.gather_object(value, values, dst=0, group=self._host)
        return values or []

    def run_dir(self, path: str | None) -> str:
        """Returns the run folder; the store of torchrun keeps it for processes that are restarted."""
        if path is not None and (store := _agent_store()) is not None:
            store.set(RUN_DIR, path)
        return self.share(path)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Returns for each flag whether a process has it set."""
        numbers = torch.tensor(flags, dtype=torch.int32)
        distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX, group=self._host)
        return tuple(bool(number) for number in numbers.tolist())


def _now(launch: Callable[[], None]) -> None:
    launch()


def _add_up(flat: Tensor) -> None:
    distributed.all_reduce(flat)


@contextmanager
def joined(spec: RunSpec) -> Iterator[Collective]:
    """Connects the processes of a run: alone without `multi_gpu`.

    Raises:
        ConfigError: torchrun has not started this process, or `multi_gpu` is not set though it has. There are more
            processes than GPUs, the algorithm cannot learn with others, or the settings of the processes differ.
    """
    cfg, started = spec.cfg, "TORCHELASTIC_RUN_ID" in os.environ
    count = int(os.environ.get("WORLD_SIZE", "1")) if started else 1
    if cfg.test or not cfg.multi_gpu:
        if count > 1:
            setting, advice = ("test=true", "python train.py") if cfg.test else ("multi_gpu=false", "multi_gpu=true")
            raise ConfigError(f"{setting}, and torchrun has started {count} processes. Try {advice}")
        yield ALONE
        return
    if not started:
        run = f"checkpoint={cfg.checkpoint}" if cfg.checkpoint else f"task={spec.task_class.__name__}"
        advice = f"torchrun --nproc-per-node=2 train.py {shlex.quote(run)} multi_gpu=true, or multi_gpu=false"
        raise ConfigError(f"multi_gpu=true: torchrun must start the processes. Try {advice}")
    if not declarations(type(cfg.algorithm)).data_parallel:
        raise ConfigError(f"multi_gpu=true: algo={cfg.algo} learns in one process only. Try multi_gpu=false")
    on_cuda = _choose_gpu(cfg)
    heartbeat = Heartbeat(_connect("nccl" if on_cuda else "gloo"), int(os.environ["RANK"]), count, cfg.lost_after_s)
    try:
        processes = Processes()
        _check_equal(processes, spec)  # behind it all have begun to beat
        with heartbeat:
            yield processes
    except RuntimeError as error:
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        if not heartbeat.over:
            say(f"process {os.environ['RANK']} of {count} ends: it has lost another one", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        with suppress(RuntimeError):  # others may be gone
            distributed.destroy_process_group()


def _connect(backend: str) -> Store:
    """Connects the processes; returns a connection of its own to what they share.

    torch 2.13 leaves in the store of torchrun what the processes before a restart wrote, and gloo would look for them.
    So each start, and each run of a sweep, has a prefix of its own in the store.
    """
    store, (rank, size) = _agent_store(), (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE"))
    if store is None:
        distributed.init_process_group(backend, timeout=PATIENCE)
        return PrefixStore("gpusim_rl", _store())
    prefix = "gpusim_rl/" + _agree(PrefixStore("gpusim_rl", store), rank, size)
    keys = PrefixStore(prefix, store)
    distributed.init_process_group(backend, store=keys, rank=rank, world_size=size, timeout=PATIENCE)
    return PrefixStore(prefix, _store())


def _agree(store: Store, rank: int, size: int) -> str:
    """Returns a word for this start, the same in all processes, whatever earlier starts have left in the store.

    The number of restarts, which torchrun tells, is another one on a machine that did not lose the process.
    """
    word, until = secrets.token_hex(8), time.monotonic() + PATIENCE.total_seconds()
    calls = [f"start_{number}" for number in range(size)]
    store.set(calls[rank], word)
    store.wait(calls, PATIENCE)
    while time.monotonic() < until:
        if rank == 0:
            store.set("starts", " ".join([word, *(call.decode() for call in store.multi_get(calls[1:]))]))
            if store.check([f"{word}/{number}" for number in range(1, size)]):
                return word
        elif word in (words := store.get("starts").decode().split()):
            store.set(f"{words[0]}/{rank}", "")
            return words[0]
        time.sleep(0.05)
    raise distributed.DistStoreError(f"process {rank} of {size} waited {PATIENCE} for the others to start")


def _choose_gpu(cfg: RunConfig) -> bool:
    """Gives each process of a machine a GPU of its own; returns whether the learner is on it."""
    for key in ("device", "sim_device", "rl_device"):
        if ":" in (device := getattr(cfg, key) or ""):
            raise ConfigError(f"{key}={device} with multi_gpu=true: each process takes a GPU. Try {key}=cuda")
    if "cpu" in (cfg.rl_device, cfg.rl_device or cfg.device) or not torch.cuda.is_available():
        return False
    gpus, local, here = torch.cuda.device_count(), *(int(os.environ[f"LOCAL_{key}"]) for key in ("RANK", "WORLD_SIZE"))
    if here > gpus:
        problem = f"torchrun has started {here} processes on a machine with {gpus} GPU{'s' if gpus > 1 else ''}"
        raise ConfigError(f"{problem}. Try torchrun --nproc-per-node={gpus}, or device=cpu")
    torch.cuda.set_device(local)
    return True


def _check_equal(processes: Processes, spec: RunSpec) -> None:
    """Stops all processes where their settings differ."""
    configs, problem = processes.gather(spec.config), None
    for rank, config in enumerate(configs):
        keys = [key for key in {**configs[0], **config} if config.get(key) != configs[0].get(key)]
        if keys:
            problem = "; ".join(structural_difference(configs[0], config, keys)) or ", ".join(keys)
            problem = problem.replace("saved", "process 0 has").replace("now", f"process {rank} has")
            break
    problem = processes.share(problem)
    if problem is not None:
        raise ConfigError(f"the processes of torchrun have different settings: {problem}. Try the same command for all")


def continued(arguments: list[str]) -> list[str]:
    """Return the command line of a process of torchrun: one that was restarted continues the run that it began.

    A run without a checkpoint yet is begun again.
    """
    store = _agent_store()
    sweep = {"-m", "--multirun"} & {*arguments}  # which run of it was lost is not known
    if store is None or sweep or not store.check([RUN_DIR]):
        return arguments
    run = store.get(RUN_DIR).decode()
    if not Path(run, "checkpoints", "last.pt").is_file():  # it was lost before its first checkpoint: begin anew
        return arguments
    return [*(text for text in arguments if not text.startswith("checkpoint=")), f"checkpoint={run}"]


def _agent_store() -> TCPStore | None:
    """Returns the store that torchrun itself keeps."""
    return _store() if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else None


def _store() -> TCPStore:
    """Returns a new connection to the store of the processes."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(*address, is_master=False, timeout=PATIENCE)
