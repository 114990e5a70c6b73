"""Actors as processes on this machine: `actors=process`.

Rollout tensors and weights are in shared memory; the rest goes through a socket. Each process is a new Python command,
because multiprocessing would import the user's script.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
from torch import Tensor

from gpusim_rl.distributed.actor import Actor, ActorJob, EnvDescription, Failed, SentRollout
from gpusim_rl.distributed.engine import NO_ANSWER, Answer, Engine, Lost
from gpusim_rl.distributed.shared_memory import SharedMemory
from gpusim_rl.machine.child import Child, same_import_env

SLOTS = 2  # rollout buffers per actor
RETRY_S = 1e-4  # retry interval while weights are being written [s]
MOST_PRINTED = 1_000_000  # maximum size of an actor's kept output [bytes]
STDERR = 2
_START = "import sys; from gpusim_rl.distributed.process_engine import main; main(*map(int, sys.argv[1:]))"


class SharedWeights:
    """Shared weights with one writer and many readers, protected by a sequence lock.

    Readers retry if the count is odd or changed, so a process that is killed while reading does not block others.
    Requires ordered stores between processes, as on x86.
    """

    def __init__(self, memory: SharedMemory, state: Mapping[str, Tensor]) -> None:
        shapes = [((2,), torch.int64), *((tuple(x.shape), x.dtype) for x in state.values())]
        numbers, *tensors = memory.lay_out(shapes)
        self._numbers, self._tensors = numbers.numpy(), dict(zip(state, tensors, strict=True))
        self._copy = {name: torch.empty_like(x) for name, x in self._tensors.items()}

    def write(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Publish weights (host tensors)."""
        self._numbers[1] += 1
        for name, shared in self._tensors.items():
            shared.copy_(state[name])
        self._numbers[0] = version
        self._numbers[1] += 1

    def read(self) -> tuple[int, dict[str, Tensor]]:
        """Return the newest version and its weights, valid until the next call."""
        while True:
            count = int(self._numbers[1])
            if count % 2 == 0:
                for name, copy in self._copy.items():
                    copy.copy_(self._tensors[name])
                version = int(self._numbers[0])
                if int(self._numbers[1]) == count:
                    return version, self._copy
            time.sleep(RETRY_S)


class _Process:
    """Learner's handle to an actor process."""

    def __init__(self, job: ActorJob, weights: SharedMemory) -> None:
        ours, theirs = socket.socketpair()  # unlike with a pipe, each end detects the loss of the other
        self.job, self.memory = job, SharedMemory()
        fds = theirs.fileno(), weights.fd, self.memory.fd
        threads = str(job.config["actors"]["threads"])
        env = same_import_env(OMP_NUM_THREADS=threads, CUDA_VISIBLE_DEVICES="")
        self.child = Child([sys.executable, "-c", _START, *map(str, fds)], env=env, pass_fds=fds)
        theirs.close()
        if timeout_s := job.config["actors"]["timeout_s"]:  # an actor may hang in the middle of a message
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", max(1, round(timeout_s)), 0))
        self.connection = Connection(ours.detach())
        self.slots: list[list[Tensor]] = []
        self._free: list[int] = []  # free rollout slots
        self._waiting = 0  # requested rollouts without a slot
        _send(self.connection, job)

    def ask(self, request: str, argument: Any) -> None:
        try:
            _send(self.connection, (request, argument))
        except BlockingIOError:  # the actor hangs with half of a request
            self.child.kill()
        except OSError:  # the actor has died, which `get` notices
            pass

    def lay_out(self, envs: EnvDescription, *, pin: bool) -> None:
        self.slots = _lay_out_slots(self.memory, envs, pin=pin)
        self.ask_for_rollouts(0, range(SLOTS))

    def ask_for_rollouts(self, count: int, freed: Iterable[int] = ()) -> None:
        self._waiting += count
        self._free += freed
        while self._waiting and self._free:
            self._waiting -= 1
            self.ask("rollout", self._free.pop())

    def close(self) -> None:
        self.connection.close()
        self.child.close()
        self.memory.close()


class ProcessEngine(Engine):
    """Actors in processes on this machine; `pin` registers rollout buffers as pinned memory for CUDA."""

    waits_for = "Actors are still creating their envs"

    def __init__(self, jobs: Sequence[ActorJob], *, pin: bool) -> None:
        super().__init__(len(jobs), jobs[0].config["actors"]["timeout_s"])
        self._jobs, self._pin = jobs, pin
        self._weights_memory = SharedMemory()
        self._weights: SharedWeights | None = None
        self._actors: list[_Process] = []

    def start(self) -> None:
        for actor, job in enumerate(self._jobs):
            self._actors.append(_Process(job, self._weights_memory))
            self._silence.asked(actor)  # it owes its description

    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        if self._weights is None:
            self._weights = SharedWeights(self._weights_memory, state)
        self._weights.write(version, state)

    def _ask(self, actor: int, request: str, argument: Any) -> None:
        if request == "rollout":
            self._actors[actor].ask_for_rollouts(1)
        else:
            self._actors[actor].ask(request, argument)

    def _get(self, timeout_s: float) -> list[Answer]:
        by_connection = {process.connection: actor for actor, process in enumerate(self._actors)}
        ready: list[Any] = wait([*by_connection], timeout_s)
        return [self._read(by_connection[connection]) for connection in ready]

    def _read(self, actor: int) -> Answer:
        process = self._actors[actor]
        try:
            answer = self._received(_receive(process.connection))
        except BlockingIOError:  # the actor hangs in the middle of a message
            return self._replace(actor, self._jobs[0].config["actors"]["timeout_s"])
        except (EOFError, OSError, pickle.UnpicklingError):
            return self._replace(actor, None, process.child.last_line())
        if isinstance(answer, EnvDescription):
            process.lay_out(answer, pin=self._pin)
        elif isinstance(answer, SentRollout):
            return replace(answer, tensors=process.slots[answer.place], place=(process, answer.place))
        return answer

    def release(self, rollout: SentRollout) -> None:
        process, slot = rollout.place
        process.ask_for_rollouts(0, [slot])

    def _replace(self, actor: int, silent_s: float | None, last_words: str = NO_ANSWER) -> Lost:
        process = self._actors[actor]
        lost = self._died(actor, last_words, silent_s)
        process.close()
        self._actors[actor] = _Process(replace(process.job, attempt=process.job.attempt + 1), self._weights_memory)
        self._silence.asked(actor)
        return lost

    def close(self) -> None:
        for process in self._actors:
            process.close()
        self._actors.clear()
        self._weights_memory.close()


def _lay_out_slots(memory: SharedMemory, envs: EnvDescription, *, pin: bool = False) -> list[list[Tensor]]:
    """Return the rollout tensors of each slot in memory shared by actor and learner."""
    tensors, size = memory.lay_out(envs.recording * SLOTS, pin=pin), len(envs.recording)
    return [tensors[slot * size : (slot + 1) * size] for slot in range(SLOTS)]


def _send(connection: Connection, message: Any) -> None:
    connection.send_bytes(pickle.dumps(message))  # Connection.send would pass tensors as shared-memory files


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def main(connection_fd: int, weights_fd: int, memory_fd: int) -> None:
    """Run an actor for the learner at the other end of a connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(connection_fd)
    job = _hear_learner(connection)
    try:
        _work(connection, job, SharedMemory(weights_fd), SharedMemory(memory_fd))
    except BaseException as error:
        _tell_learner(connection, Failed.of(job.number, error))
        _exit(1)


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads or processes of third-party envs would keep this process alive


def _hear_learner(connection: Connection) -> Any:
    try:
        return _receive(connection)
    except (EOFError, OSError):  # the learner has ended
        _exit(0)


def _tell_learner(connection: Connection, answer: Answer | Failed) -> None:
    try:
        _send(connection, answer)
    except OSError:  # the learner has ended
        _exit(0)


def _work(connection: Connection, job: ActorJob, weights_memory: SharedMemory, memory: SharedMemory) -> None:
    actor = Actor(job)
    weights, envs = SharedWeights(weights_memory, actor.acting_state()), actor.describe()
    slots = _lay_out_slots(memory, envs)
    _tell_learner(connection, envs)
    while True:
        request, argument = _hear_learner(connection)
        if request == "rollout":
            rollout = actor.rollout(*weights.read())
            for shared, recorded in zip(slots[argument], rollout.tensors, strict=True):
                shared.copy_(recorded)
            _tell_learner(connection, replace(rollout, tensors=(), place=argument))
        elif (answer := actor.do(request, argument)) is not None:
            _tell_learner(connection, answer)
        if os.fstat(STDERR).st_size > MOST_PRINTED:
            os.ftruncate(STDERR, 0)
