"""Actors as processes of this machine: `actors=process`.

A process and the learner share the tensors of rollouts and the weights. The rest goes through a pipe. Processes are
started by a command line of their own and not by multiprocessing, which would run the user's script in each of them.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import numpy as np
from torch import Tensor

from gpusim_rl.distributed.actor import Actor, ActorJob, EnvDescription
from gpusim_rl.distributed.engine import (
    Answer,
    Described,
    Engine,
    SentRollout,
    Stepped,
    describe_error,
    raise_error,
)
from gpusim_rl.distributed.shared_memory import SharedMemory, SharedWeights
from gpusim_rl.machine.child import Child, importing_the_same

SLOTS = 2
"""Rollouts of an actor that the learner has not copied yet, at most."""
MOST_PRINTED = 1_000_000  # bytes of what an actor has printed
_START = "import sys; from gpusim_rl.distributed.process_engine import main; main(*map(int, sys.argv[1:]))"


@dataclass(slots=True)
class _Process:
    """An actor that was started."""

    job: ActorJob
    child: Child
    connection: Connection
    memory: SharedMemory
    slots: list[list[Tensor]]
    free: list[int]
    """Slots that a rollout may go to."""
    waiting: int = 0
    """Rollouts that were asked for, and have no slot yet."""


class ProcessEngine(Engine):
    """Processes of this machine.

    Args:
        jobs: What each actor is made from.
        pin: The learner is on CUDA, which copies rollouts from pinned memory.
    """

    name = "process"
    waits_for = "It makes its envs"

    def __init__(self, jobs: list[ActorJob], *, pin: bool) -> None:
        super().__init__(len(jobs))
        self._jobs, self._pin = jobs, pin
        self._weights_memory = SharedMemory()
        self._weights: SharedWeights | None = None
        self._actors: list[_Process] = []

    def start(self) -> None:
        """Starts all processes."""
        for job in self._jobs:
            self._actors.append(self._start(job))

    def _start(self, job: ActorJob) -> _Process:
        ours, theirs = _pipe()
        memory = SharedMemory()
        fds = theirs.fileno(), self._weights_memory.fd, memory.fd
        threads = str(job.config["actors"]["threads"])
        env = importing_the_same(OMP_NUM_THREADS=threads, CUDA_VISIBLE_DEVICES="")
        child = Child([sys.executable, "-c", _START, *map(str, fds)], env=env, pass_fds=fds)
        theirs.close()
        _send(ours, job)
        return _Process(job, child, ours, memory, [], [])

    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Writes them to where all processes read."""
        if self._weights is None:
            self._weights = SharedWeights(self._weights_memory, state)
        self._weights.write(version, state)

    def ask_for_rollout(self, actor: int) -> None:
        """Asks now, or when a slot is free."""
        self._actors[actor].waiting += 1
        self._hand_out(self._actors[actor])

    def _hand_out(self, it: _Process) -> None:
        while it.waiting and it.free:
            it.waiting -= 1
            self._tell(it, ("rollout", it.free.pop()))

    def ask_for_step(self, actor: int, action: np.ndarray | None) -> None:
        """Asks through the pipe: a control step is small."""
        self._tell(self._actors[actor], ("step", action))

    def begin_from(self, actor: int, progress: dict[str, Any]) -> None:
        """Tells it."""
        self._tell(self._actors[actor], ("begin", progress))

    def _tell(self, it: _Process, message: Any) -> None:
        with suppress(OSError):  # it has died: `get` will notice
            _send(it.connection, message)

    def get(self, timeout_s: float) -> list[Answer]:
        """What has come."""
        by_connection = {it.connection: actor for actor, it in enumerate(self._actors)}
        ready: list[Any] = wait([*by_connection], timeout_s)
        return [answer for connection in ready if (answer := self._read(by_connection[connection])) is not None]

    def _read(self, actor: int) -> Answer | None:
        it = self._actors[actor]
        try:
            kind, *message = _receive(it.connection)
        except (EOFError, OSError, pickle.UnpicklingError):
            return self._start_again(actor)
        if kind == "error":
            raise_error(actor, *message)
        if kind == "described":
            [envs] = message
            self._lay_out(it, envs)
            return Described(actor, envs)
        if kind == "recorded" or len(message) > 1:  # not by a first observation alone
            self._answered(actor)
        if kind == "recorded":
            slot, info = message
            return SentRollout(actor, it.slots[slot], info, (it, slot))
        return Stepped(actor, *message)

    def _lay_out(self, it: _Process, envs: EnvDescription) -> None:
        tensors = it.memory.lay_out(envs.recording * SLOTS, pin=self._pin)
        size = len(envs.recording)
        it.slots = [tensors[slot * size : (slot + 1) * size] for slot in range(SLOTS)]
        it.free = list(range(SLOTS))
        self._hand_out(it)

    def release(self, rollout: SentRollout) -> None:
        """The slot may be written again."""
        it, slot = rollout.place
        it.free.append(slot)
        self._hand_out(it)

    def _start_again(self, actor: int) -> Answer:
        it = self._actors[actor]
        lost = self._died(actor, it.child.last_line())
        self._end(it)
        self._actors[actor] = self._start(replace(it.job, attempt=it.job.attempt + 1))
        return lost

    def numbers(self) -> dict[str, float]:
        """None; forgets what was printed long ago."""
        for it in self._actors:
            with suppress(ValueError):  # closed: the thread of `inference=learner` is starting the actor again
                if os.fstat(it.child.printed.fileno()).st_size > MOST_PRINTED:
                    os.ftruncate(it.child.printed.fileno(), 0)
        return {}

    def _end(self, it: _Process) -> None:
        it.connection.close()
        it.child.close()
        it.memory.close()

    def close(self) -> None:
        """Ends all processes."""
        for it in self._actors:
            self._end(it)
        self._actors.clear()
        self._weights_memory.close()


def _pipe() -> tuple[Connection, Connection]:
    # A pair of sockets: both ends see when the other one is gone.
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), Connection(theirs.detach())


def _send(connection: Connection, message: Any) -> None:
    # Connection.send would pass tensors on as files of shared memory.
    connection.send_bytes(pickle.dumps(message))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


# The process


def main(connection_fd: int, weights_fd: int, memory_fd: int) -> None:
    """Works for the learner at the other end of a connection, as long as it is there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(connection_fd)
    try:
        _work(connection, SharedMemory(weights_fd), SharedMemory(memory_fd))
    except _LearnerGoneError:
        _exit(0)
    except BaseException as error:
        with suppress(_LearnerGoneError):
            _tell_learner(connection, ("error", *describe_error(error)))
        _exit(1)


def _exit(code: int) -> NoReturn:
    # Envs of other libraries may have threads or processes that would keep this one alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _LearnerGoneError(Exception):
    """The learner has ended. Envs may raise the errors of a connection themselves, for reasons of their own."""


def _hear_learner(connection: Connection) -> Any:
    try:
        return _receive(connection)
    except (EOFError, OSError):
        raise _LearnerGoneError from None


def _tell_learner(connection: Connection, message: Any) -> None:
    try:
        _send(connection, message)
    except OSError:
        raise _LearnerGoneError from None


def _work(connection: Connection, weights_memory: SharedMemory, memory: SharedMemory) -> None:
    actor = Actor(_hear_learner(connection))
    weights = SharedWeights(weights_memory, actor.acting_state())
    envs = actor.describe()
    size = len(envs.recording)
    tensors = memory.lay_out(envs.recording * SLOTS)
    _tell_learner(connection, ("described", envs))
    while True:
        kind, argument = _hear_learner(connection)
        if kind == "rollout":
            recording, info = actor.rollout(*weights.read())
            for own, recorded in zip(tensors[argument * size : (argument + 1) * size], recording, strict=True):
                own.copy_(recorded)
            _tell_learner(connection, ("recorded", argument, info))
        elif kind == "begin":
            actor.begin_from(argument)
        elif argument is None:
            _tell_learner(connection, ("stepped", actor.first_obs()))
        else:
            _tell_learner(connection, ("stepped", None, *actor.step(argument)))
