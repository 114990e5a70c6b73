"""Data parallelism under torchrun: every process steps its own envs, and all learn one policy."""

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

PATIENCE = timedelta(minutes=10)  # timeout for other live processes, which may compile or write a large checkpoint
RUN_DIR = "gpusim_rl/run_dir"  # key of the run folder in torchrun's store, which survives restarts of the processes


class Processes(Collective):
    """Collective of torchrun's processes: sums use NCCL on CUDA, else gloo; host values always use gloo."""

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        on_cuda = distributed.get_backend() == "nccl"
        self.summing_s = None if on_cuda else 0.0
        self._host: Any = distributed.new_group(backend="gloo", timeout=PATIENCE) if on_cuda else None
        self._launch: Callable[[Callable[[], None]], None] = _now

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums over all processes, tensor by tensor, in one all-reduce."""
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
    def defer_launches(self, launch_between: Callable[[Callable[[], None]], None]) -> Iterator[None]:
        """Within the block, pass each all-reduce to `launch_between`, to run between replays of two CUDA graphs."""
        self._launch = launch_between
        try:
            yield
        finally:
            self._launch = _now

    def share(self, value: Any) -> Any:
        """Broadcast the first process's value; return it in all processes."""
        box = [value]
        distributed.broadcast_object_list(box, src=0, group=self._host)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return all processes' values in the first process, and [] in the others."""
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        distributed.gather_object(value, values, dst=0, group=self._host)
        return values or []

    def run_dir(self, path: str | None) -> str:
        """Return the first process's run folder, and keep it in torchrun's store for restarts."""
        if path is not None and (store := _agent_store()) is not None:
            store.set(RUN_DIR, path)
        return self.share(path)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Return whether each flag is set in any process."""
        numbers = torch.tensor(flags, dtype=torch.int32)
        distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX, group=self._host)
        return tuple(bool(number) for number in numbers.tolist())


def _now(launch: Callable[[], None]) -> None:
    launch()


def _add_up(flat: Tensor) -> None:
    distributed.all_reduce(flat)


@contextmanager
def joined(spec: RunSpec) -> Iterator[Collective]:
    """Connect the processes of a run; yield their collective, or `ALONE` without `multi_gpu`.

    Raises ConfigError if the processes or their settings do not match.
    """
    cfg, started = spec.cfg, "TORCHELASTIC_RUN_ID" in os.environ
    count = int(os.environ.get("WORLD_SIZE", "1")) if started else 1
    if cfg.test or not cfg.multi_gpu:
        if count > 1:
            key, hint = ("test=true", "Try python train.py") if cfg.test else ("multi_gpu=false", "Try multi_gpu=true")
            raise ConfigError(f"requires a single process, but torchrun started {count}", key=key, hint=hint)
        yield ALONE
        return
    if not started:
        run = f"checkpoint={cfg.checkpoint}" if cfg.checkpoint else f"task={spec.task_class.__name__}"
        hint = f"Try torchrun --nproc-per-node=2 train.py {shlex.quote(run)} multi_gpu=true, or multi_gpu=false"
        raise ConfigError("the run must be started with torchrun", key="multi_gpu=true", hint=hint)
    if not declarations(type(cfg.algorithm)).data_parallel:
        raise ConfigError(f"not supported by algo={cfg.algo}", key="multi_gpu=true", hint="Try multi_gpu=false")
    on_cuda = _choose_gpu(cfg)
    heartbeat = Heartbeat(_connect("nccl" if on_cuda else "gloo"), int(os.environ["RANK"]), count, cfg.lost_after_s)
    try:
        processes = Processes()
        _check_equal(processes, spec)  # also a barrier: afterwards, all processes send heartbeats
        with heartbeat:
            yield processes
    except RuntimeError as error:
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        if not heartbeat.over:
            say(f"process {os.environ['RANK']} of {count} exits: lost another process", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        with suppress(RuntimeError):  # other processes may be gone
            distributed.destroy_process_group()


def _connect(backend: str) -> Store:
    """Initialise the process group; return a separate connection to its store.

    Each start has its own prefix: torch 2.13 keeps keys from before a restart in torchrun's store, where gloo would
    read them.
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
    """Return a random word for this start, the same in all processes.

    torchrun's restart count would differ on machines that lost no process.
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
    raise distributed.DistStoreError(f"process {rank} of {size} timed out: the others did not start within {PATIENCE}")


def _choose_gpu(cfg: RunConfig) -> bool:
    """Assign a GPU to each process of a machine; return whether the learner uses it."""
    for key in ("device", "sim_device", "rl_device"):
        if ":" in (device := getattr(cfg, key) or ""):
            hint = f"With multi_gpu=true, each process uses its own GPU. Try {key}=cuda"
            raise ConfigError("puts all processes on one GPU", key=f"{key}={device}", hint=hint)
    if "cpu" in (cfg.rl_device, cfg.rl_device or cfg.device) or not torch.cuda.is_available():
        return False
    gpus, local, here = torch.cuda.device_count(), *(int(os.environ[f"LOCAL_{key}"]) for key in ("RANK", "WORLD_SIZE"))
    if here > gpus:
        problem = f"torchrun started {here} processes on a machine with {gpus} GPU{'s' if gpus > 1 else ''}"
        raise ConfigError(problem, hint=f"Try torchrun --nproc-per-node={gpus}, or device=cpu")
    torch.cuda.set_device(local)
    return True


def _check_equal(processes: Processes, spec: RunSpec) -> None:
    configs, problem = processes.gather(spec.config), None
    for rank, config in enumerate(configs):
        keys = [key for key in {**configs[0], **config} if config.get(key) != configs[0].get(key)]
        if keys:
            problem = "; ".join(structural_difference(configs[0], config, keys)) or ", ".join(keys)
            problem = problem.replace("saved", "process 0 has").replace("now", f"process {rank} has")
            break
    problem = processes.share(problem)
    if problem is not None:
        raise ConfigError(f"processes have different settings: {problem}", hint="Use one command for all processes")


def continued(arguments: list[str]) -> list[str]:
    """Return the command line of a torchrun process, with the run's `checkpoint=` after a restart."""
    store = _agent_store()
    sweep = {"-m", "--multirun"} & {*arguments}  # it is unknown which run of a sweep was lost
    if store is None or sweep or not store.check([RUN_DIR]):
        return arguments
    run = store.get(RUN_DIR).decode()
    if not Path(run, "checkpoints", "last.pt").is_file():
        return arguments
    return [*(text for text in arguments if not text.startswith("checkpoint=")), f"checkpoint={run}"]


def _agent_store() -> TCPStore | None:
    """Return torchrun's own store, or None if unused."""
    return _store() if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else None


def _store() -> TCPStore:
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(*address, is_master=False, timeout=PATIENCE)
