"""Replay memory of images: every frame is stored once, and stacks of frames are made when they are sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from gpusim_rl.errors import import_extra
from gpusim_rl.learn.algorithm import EnvSpec, Observation, Outcome
from gpusim_rl.learn.replay import Replay, Trajectory, Transitions, ends_by_time

BLOCK = 8
"""Successive frames that are compressed together. More make it smaller, and slower to sample."""

_OBJECT_BYTES = 41  # of an object in a list, beside its content


class PlainFrames:
    """Frames as they are, in one tensor on any device: T slots, and behind them rows for final observations."""

    def __init__(self, num_steps: int, rows: int, num_envs: int, shape: Sequence[int], device: torch.device) -> None:
        self._num_steps = num_steps
        self._memory = torch.zeros(num_steps + rows, num_envs, *shape, dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory that they take [bytes]."""
        return self._memory.numel()

    def write(self, slot: Int[Tensor, "1"], frame: UInt8[Tensor, "envs *shape"]) -> None:
        """Stores the frames of a control step."""
        self._memory.index_copy_(0, slot, frame[None])

    def write_final(
        self, row: Int[Tensor, "1"], frame: UInt8[Tensor, "envs *shape"], where: Bool[Tensor, " envs"]
    ) -> None:
        """Stores the last frames of the episodes that end `where`."""
        behind = row + self._num_steps
        where = where.view(1, -1, *(1 for _ in frame.shape[1:]))
        self._memory.index_copy_(0, behind, torch.where(where, frame, self._memory[behind]))

    def read(self, index: Int[Tensor, " n"]) -> UInt8[Tensor, "n *shape"]:
        """Returns frames at slot * N + env, final ones at (T + row) * N + env."""
        return self._memory.flatten(0, 1).index_select(0, index)

    def state_dict(self, fill: int) -> dict[str, Tensor]:
        """Returns all that is stored, in so many slots."""
        return {"frames": self._memory[:fill].clone(), "final": self._memory[self._num_steps :].clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores `state_dict`, in place."""
        self._memory[: len(state["frames"])].copy_(state["frames"])
        self._memory[self._num_steps :].copy_(state["final"])


class CompressedFrames:
    """Frames in the memory of the host, compressed without loss.

    Of `BLOCK` successive frames of an environment the first is kept, and of the others the difference to the one
    before. LZ4 compresses the block when its last frame is written. Final observations are few, and stay as they are.
    The number of slots is a multiple of `BLOCK`.

    Raises:
        ConfigError: The package lz4 is not installed.
    """

    def __init__(self, num_steps: int, rows: int, num_envs: int, shape: Sequence[int]) -> None:
        assert num_steps % BLOCK == 0
        self._lz4 = import_extra("lz4.block", "lz4", "a replay memory of compressed frames")
        self._num_envs, self._first_row, self._shape = num_envs, num_steps * num_envs, tuple(shape)
        self._final = PlainFrames(0, rows, num_envs, shape, torch.device("cpu"))
        self._blocks = [b""] * (self._first_row // BLOCK)  # block * N + env
        self._open = np.zeros((num_envs, BLOCK, int(np.prod(shape))), np.uint8)  # the block that is being written
        self._newest = -1  # slot

    @property
    def num_bytes(self) -> int:
        """Memory that they take [bytes]."""
        blocks = sum(map(len, self._blocks)) + _OBJECT_BYTES * len(self._blocks)
        return blocks + self._open.nbytes + self._final.num_bytes

    def write(self, slot: Int[Tensor, "1"], frame: UInt8[Tensor, "envs *shape"]) -> None:
        """Stores the frames of a control step; in every `BLOCK`-th step, compresses a block of each env."""
        self._newest = int(slot)
        block, position = divmod(self._newest, BLOCK)
        self._open[:, position] = frame.flatten(1).numpy()
        if position < BLOCK - 1:
            return
        differences = self._open.copy()
        differences[:, 1:] -= self._open[:, :-1]  # modulo 256
        for env, one in enumerate(differences):
            self._blocks[block * self._num_envs + env] = self._lz4.compress(one.reshape(-1), store_size=False)

    def write_final(
        self, row: Int[Tensor, "1"], frame: UInt8[Tensor, "envs *shape"], where: Bool[Tensor, " envs"]
    ) -> None:
        """Stores the last frames of the episodes that end `where`."""
        self._final.write_final(row, frame, where)

    def read(self, index: Int[Tensor, " n"]) -> UInt8[Tensor, "n *shape"]:
        """Returns frames as `PlainFrames.read`; unpacks a block once for all its frames."""
        places = index.numpy()
        frames = np.zeros((len(places), self._open.shape[2]), np.uint8)
        slot, env = np.divmod(places, self._num_envs)
        block, position = np.divmod(slot, BLOCK)
        final = places >= self._first_row
        newest_block, newest = divmod(self._newest, BLOCK)
        # The older frames of the block that is being written over are in its compressed form still.
        is_open = (block == newest_block) & (position <= newest)
        frames[final] = self._final.read(torch.from_numpy(places[final] - self._first_row)).flatten(1).numpy()
        frames[is_open] = self._open[env[is_open], position[is_open]]
        closed = np.flatnonzero(~final & ~is_open)
        owner = block[closed] * self._num_envs + env[closed]
        order = np.argsort(owner, kind="stable")
        closed, owner = closed[order], owner[order]
        for rows in np.split(closed, np.flatnonzero(np.diff(owner)) + 1) if len(closed) else ():
            wanted = position[rows]
            data = self._blocks[block[rows[0]] * self._num_envs + env[rows[0]]]
            if data:  # else nothing has been written there
                differences = self._unpack(data)[: wanted.max() + 1]
                frames[rows] = np.add.accumulate(differences, axis=0, dtype=np.uint8)[wanted]
        return torch.from_numpy(frames.reshape(-1, *self._shape))

    def _unpack(self, data: bytes) -> np.ndarray:
        size = self._open[0].size
        return np.frombuffer(self._lz4.decompress(data, uncompressed_size=size), np.uint8).reshape(BLOCK, -1)

    def state_dict(self, fill: int) -> dict[str, Tensor]:
        """Returns all that is stored."""
        return {
            "blocks": torch.from_numpy(np.frombuffer(b"".join(self._blocks), np.uint8).copy()),
            "sizes": torch.tensor([len(data) for data in self._blocks]),
            "open": torch.from_numpy(self._open.copy()),
            "newest": torch.tensor(self._newest),
            "final": self._final.state_dict(0)["final"],
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores `state_dict`."""
        joined, ends = state["blocks"].numpy().tobytes(), state["sizes"].cumsum(0).tolist()
        self._blocks = [joined[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        self._open[:] = state["open"].numpy()
        self._newest = int(state["newest"])
        self._final.load_state_dict({"frames": state["final"][:0], "final": state["final"]})


class PixelReplay:
    """The last T control steps of N environments that observe images. Samples are stacks of frames.

    Windows of n steps, ends of episodes and final observations are those of `Replay`, which keeps the places of frames
    in their stead. A frame is stored once. A stack does not reach back across the end of an episode: there the first
    frame of the episode is repeated, as by Gymnasium's `FrameStackObservation` (`padding_type="reset"`). The first step
    that is written counts as the first of its episode. Where a frame of a stack is older than T steps, the transition
    has weight 0.

    With `compress` the frames are in the memory of the host, as differences under LZ4: smaller by far where little
    moves, and slower to sample (benchmarks/pixel_replay.json). Without, nothing is read on the host.

    Args:
        num_steps: T; more than `n_step`, and with `compress` a multiple of `BLOCK`.
        env: Environments.
        group: Observation group of the frames.
        shape: Shape of a frame, e.g. (channels, height, width).
        groups: Other observation groups to keep.
        stack: Frames in an observation.
        n_step: Largest number of steps in a window.
        gamma: Discount per step.
        device: Device of the memory.
        compress: Whether to compress the frames; on the CPU only.

    Attributes:
        replay: Everything but the frames. `Priorities` may draw from it, and `with_frames` completes what they draw.

    Raises:
        ConfigError: `compress` without the package lz4.
    """

    def __init__(
        self,
        num_steps: int,
        env: EnvSpec,
        group: str,
        shape: Sequence[int],
        *,
        groups: Iterable[str] = (),
        stack: int,
        n_step: int,
        gamma: float,
        device: torch.device,
        compress: bool = False,
    ) -> None:
        assert device.type == "cpu" or not compress
        self.group, self.stack, self.num_envs, self.num_steps = group, stack, env.num_envs, num_steps
        # Place of the frame, and slot of the step that it was seen before, or after where it is final.
        sizes = {name: env.obs_sizes[name] for name in groups} | {group: 2}
        spec = dataclasses.replace(env, obs_sizes=sizes)
        self.replay = Replay(num_steps, spec, sizes, n_step=n_step, gamma=gamma, storage=torch.float32, device=device)
        places = len(self.replay.obs[group])
        assert places <= 2**24  # which float32 holds exactly
        rows = places - num_steps
        self.frames = (
            CompressedFrames(num_steps, rows, env.num_envs, shape)
            if compress
            else PlainFrames(num_steps, rows, env.num_envs, shape, device)
        )
        self._back = torch.arange(1, stack, device=device)[:, None]

    @property
    def num_bytes(self) -> int:
        """Memory that it takes [bytes]."""
        return self.replay.num_bytes + self.frames.num_bytes

    @torch.no_grad()
    def write(self, obs: Observation, action: Tensor, step: Outcome) -> None:
        """Stores a control step as `Replay.write`; of frames, the newest one only, uint8 [N, *shape]."""
        slot, row = self.replay.next_place()
        self.frames.write(slot, obs[self.group])
        self.frames.write_final(row, step.final_obs[self.group], ends_by_time(step))
        place = torch.cat([slot, slot]).float().expand(self.num_envs, -1)
        final = torch.cat([row + self.num_steps, slot]).float().expand(self.num_envs, -1)
        seen, left = {**obs, self.group: place}, {**step.final_obs, self.group: final}
        flags = step.terminated, step.truncated, step.diverged
        self.replay.write(seen, action, Trajectory(seen, action, left, step.reward, *flags))

    def sample(self, size: int, generator: torch.Generator) -> Transitions:
        """Draws as `Replay.sample`; frames of `obs` and `next_obs` are stacks, uint8 [batch, stack, *shape]."""
        return self.with_frames(self.replay.sample(size, generator))

    @torch.no_grad()
    def with_frames(self, drawn: Transitions) -> Transitions:
        """Puts stacks of frames in the place of their places, in transitions that were drawn from `replay`."""
        size, env = len(drawn.index), drawn.index % self.num_envs
        both = torch.cat([drawn.obs[self.group], drawn.next_obs[self.group]]).long()
        index, lost = self._stacks(both[:, 0], both[:, 1], env.repeat(2))
        frames = self.frames.read(index.T.flatten())
        frames = frames.view(2, size, self.stack, *frames.shape[1:])
        drawn.obs[self.group], drawn.next_obs[self.group] = frames.unbind()
        drawn.weight = drawn.weight.masked_fill(lost.view(2, size).any(dim=0), 0.0)
        return drawn

    def _stacks(self, place: Tensor, slot: Tensor, env: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the places of the frames of stacks, [stack, batch], oldest first, and which stacks miss a frame."""
        replay, steps = self.replay, self.num_steps
        newest, oldest = replay.total - 1, replay.total - replay.fill
        final = place >= steps
        time = newest - (newest - slot).remainder(steps) + final  # of the observation
        before = time - self._back
        # A step back is one within the episode. From a final observation the first one always is.
        inside = replay.ends.take(before.remainder(steps) * self.num_envs + env) == 0
        inside = (inside | (final & (self._back == 1))) & (before >= oldest)
        length = inside.cumprod(dim=0).sum(dim=0)
        lost = (length < self.stack - 1) & (time - length <= oldest) & (oldest > 0)
        older = (time - self._back.flip(0).minimum(length)).remainder(steps)
        return torch.cat([older, place[None]]).mul_(self.num_envs).add_(env), lost

    def state_dict(self) -> dict[str, Any]:
        """Returns all that is stored. Reads the number of steps on the host."""
        return {"replay": self.replay.state_dict(), "frames": self.frames.state_dict(int(self.replay.fill))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        self.replay.load_state_dict(state["replay"])
        self.frames.load_state_dict(state["frames"])
