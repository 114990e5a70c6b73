"""Replay buffer of images: each frame is stored once, and stacks are built when sampled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from gpusim_rl.errors import import_extra
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.replay import Replay, Trajectory, Transitions, ends_by_time

BLOCK = 8
"""Number of consecutive frames compressed together; larger blocks save memory, but are slower to sample."""

RATIO = 3
"""Assumed LZ4 compression ratio of rendered frames (benchmarks/updates/pixel_replay.json)."""


class PlainFrames:
    """Uncompressed frames on any device: T slots, then rows of final observations, `final`."""

    def __init__(self, num_steps: int, rows: int, num_envs: int, shape: Sequence[int], device: torch.device) -> None:
        self._memory = torch.zeros(num_steps + rows, num_envs, *shape, dtype=torch.uint8, device=device)
        self.final = self._memory[num_steps:]

    def write(self, slots: Int[Tensor, " steps"], frames: UInt8[Tensor, "steps envs *shape"]) -> None:
        """Store the frames of control steps."""
        self._memory.index_copy_(0, slots, frames)

    def read(self, index: Int[Tensor, " n"]) -> UInt8[Tensor, "n *shape"]:
        """Return the frames at indices slot * N + env; final observations are at (T + row) * N + env."""
        return self._memory.flatten(0, 1).index_select(0, index)

    def state_dict(self, fill: int) -> dict[str, Tensor]:
        """Return the first `fill` slots on the host, without `final`."""
        return {"frames": self._memory[:fill].to("cpu", copy=True)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore `state_dict`, in place."""
        self._memory[: len(state["frames"])].copy_(state["frames"])


class CompressedFrames:
    """Frames on the host, LZ4-compressed in blocks of `BLOCK` consecutive differences; final frames uncompressed."""

    def __init__(self, num_steps: int, rows: int, num_envs: int, shape: Sequence[int]) -> None:
        assert num_steps % BLOCK == 0
        self._lz4 = import_extra("lz4.block", "encoders", "replay.compress=true")
        self._num_envs, self._first_row, self._shape = num_envs, num_steps * num_envs, tuple(shape)
        self.final = torch.zeros(rows, num_envs, *shape, dtype=torch.uint8)
        self._blocks = [b""] * (self._first_row // BLOCK)  # index: block * N + env
        self._open = np.zeros((num_envs, BLOCK, int(np.prod(shape))), np.uint8)  # block under construction
        self._newest = -1  # newest slot

    def write(self, slots: Int[Tensor, " steps"], frames: UInt8[Tensor, "steps envs *shape"]) -> None:
        """Store the frames of control steps."""
        for slot, frame in zip(slots.tolist(), frames, strict=True):
            self._newest = slot
            block, position = divmod(slot, BLOCK)
            self._open[:, position] = frame.flatten(1).numpy()
            if position < BLOCK - 1:
                continue
            differences = self._open.copy()
            differences[:, 1:] -= self._open[:, :-1]  # modulo 256
            for env, one in enumerate(differences):
                self._blocks[block * self._num_envs + env] = self._lz4.compress(one.reshape(-1), store_size=False)

    def read(self, index: Int[Tensor, " n"]) -> UInt8[Tensor, "n *shape"]:
        """Return frames like `PlainFrames.read`, decompressing each block once."""
        places = index.numpy()
        frames = np.zeros((len(places), self._open.shape[2]), np.uint8)
        slot, env = np.divmod(places, self._num_envs)
        block, position = np.divmod(slot, BLOCK)
        final = places >= self._first_row
        newest_block, newest = divmod(self._newest, BLOCK)
        is_open = (block == newest_block) & (position <= newest)  # later positions: old frames, still compressed
        frames[final] = self.final.flatten(2).flatten(0, 1).numpy()[places[final] - self._first_row]
        frames[is_open] = self._open[env[is_open], position[is_open]]
        closed = np.flatnonzero(~final & ~is_open)
        owner = block[closed] * self._num_envs + env[closed]
        order = np.argsort(owner, kind="stable")
        closed, owner = closed[order], owner[order]
        for rows in np.split(closed, np.flatnonzero(np.diff(owner)) + 1) if len(closed) else ():
            wanted = position[rows]
            data = self._blocks[block[rows[0]] * self._num_envs + env[rows[0]]]
            if data:  # else never written
                unpacked = self._lz4.decompress(data, uncompressed_size=self._open[0].size)
                differences = np.frombuffer(unpacked, np.uint8).reshape(BLOCK, -1)[: wanted.max() + 1]
                frames[rows] = np.add.accumulate(differences, axis=0, dtype=np.uint8)[wanted]
        return torch.from_numpy(frames.reshape(-1, *self._shape))

    def state_dict(self, fill: int) -> dict[str, Tensor]:
        """Return the stored frames, without `final`."""
        blocks = self._blocks[: fill // BLOCK * self._num_envs]  # closed blocks
        opened = self._newest % BLOCK + 1 if fill else 0
        return {
            "blocks": torch.from_numpy(np.frombuffer(b"".join(blocks), np.uint8).copy()),
            "sizes": torch.tensor([len(data) for data in blocks], dtype=torch.int64),
            "open": torch.from_numpy(self._open[:, :opened].copy()),
            "newest": torch.tensor(self._newest),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore `state_dict`."""
        joined, ends = state["blocks"].numpy().tobytes(), [0, *state["sizes"].cumsum(0).tolist()]
        blocks = [joined[start:end] for start, end in itertools.pairwise(ends)]
        self._blocks = blocks + [b""] * (len(self._blocks) - len(blocks))
        self._open[:, : state["open"].shape[1]] = state["open"].numpy()
        self._newest = int(state["newest"])


class PixelReplay(Replay):
    """`Replay` of envs with images; samples are stacks of frames.

    Frames before the start of an episode are black. A transition has weight 0 if a frame of its stack was overwritten,
    or if it ends in a time-out without final images. Sampled transitions hold frame indices, oldest first;
    `with_frames` reads frames batch by batch. `compress` keeps frames on the host: less memory, but slower to sample.

    Args:
        num_steps: T; with `compress` a multiple of `BLOCK`.
        stack: Frames per observation.
        memory: Further arguments of `Replay`.
    """

    def __init__(
        self,
        num_steps: int,
        env: EnvSpec,
        groups: Iterable[str],
        *,
        stack: int,
        device: torch.device,
        compress: bool = False,
        **memory: Any,
    ) -> None:
        groups = sorted(groups)
        super().__init__(num_steps, env, [g for g in groups if g not in env.images], device=device, **memory)
        self.groups, self.stack = groups, stack
        self._has_final = env.final_images
        rows = self._rows * self._has_final + 1
        self._black = num_steps + rows - 1  # the last row, never written
        self.frames: dict[str, PlainFrames | CompressedFrames] = {}
        for group in sorted(env.images):
            size = num_steps, rows, env.num_envs, env.images[group]
            packed = compress and device.type != "meta"
            self.frames[group] = CompressedFrames(*size) if packed else PlainFrames(*size, device)
        self._back = torch.arange(1, stack, device=device)[:, None]
        frame = sum(map(math.prod, env.images.values()))
        self.bytes_drawn = 2 * stack * frame  # bytes per transition
        slots = num_steps // (RATIO if compress else 1) + rows
        self.expected_bytes += slots * env.num_envs * frame

    @torch.no_grad()
    def extend(self, steps: Trajectory) -> None:
        """Store consecutive steps; image observations are single frames, uint8 [T, N, H, W, C]."""
        _, slot, row = self.next_places(len(steps.reward))
        cut = ends_by_time(steps)
        for group, frames in self.frames.items():
            frames.write(slot, steps.acted_on[group])
            for t in range(len(cut) if self._has_final else 0):
                behind = row[t : t + 1]
                kept = torch.where(cut[t, :, None, None, None], steps.final_obs[group][t], frames.final[behind])
                frames.final.index_copy_(0, behind, kept)
        super().extend(steps)

    def _windows(self, first: Tensor, env: Tensor, whole: Tensor) -> tuple[Transitions, Tensor]:
        drawn, following = super()._windows(first, env, whole)
        places, lost = self._stacks(torch.cat([drawn.index, following]), env.repeat(2))
        for group in self.frames:
            drawn.obs[group], drawn.next_obs[group] = places.T.chunk(2)
        drawn.weight.masked_fill_(lost.view(2, -1).any(dim=0), 0.0)
        return drawn, following

    def _stacks(self, newest: Tensor, env: Tensor) -> tuple[Tensor, Tensor]:
        """Return frame indices of stacks that end at `newest`, [stack, batch], and a mask of incomplete stacks."""
        steps, envs, last, oldest = self.num_steps, self.num_envs, self.total - 1, self.total - self.fill
        final = newest >= steps * envs
        # the control step that follows each frame
        seen = last - (last - newest.div(envs, rounding_mode="floor")).remainder(steps)
        ended = self._final_step.take((newest - steps * envs).clamp_(min=0))
        time = torch.where(final, ended + 1, seen)
        before = time - self._back
        # whether a frame belongs to the same episode; always true one step before a final observation
        inside = self.ends.take(before.remainder(steps) * envs + env) == 0
        inside = (inside | (final & (self._back == 1))) & (before >= oldest)
        length = inside.cumprod(dim=0).sum(dim=0)
        lost = (length < self.stack - 1) & (time - length <= oldest) & (oldest > 0)
        back = self._back.flip(0)
        older = torch.where(back <= length, (time - back).remainder(steps), self._black).mul_(envs).add_(env)
        if not self._has_final:
            lost, newest = lost | final, torch.where(final, self._black * envs + env, newest)
        return torch.cat([older, newest[None]]), lost

    @torch.no_grad()
    def with_frames(self, drawn: Transitions) -> None:
        """Replace frame indices with stacks, uint8 [batch, H, W, stack * C], oldest first."""
        for group, frames in self.frames.items():
            index = torch.cat([drawn.obs[group], drawn.next_obs[group]])
            read = frames.read(index.flatten()).unflatten(0, index.shape)
            # 4 times as fast as permute on the CPU
            drawn.obs[group], drawn.next_obs[group] = torch.cat(read.unbind(1), dim=-1).chunk(2)

    def state_dict(self) -> dict[str, Any]:
        """Return all stored data, on the host."""
        state, fill = super().state_dict(), int(self.fill)
        place, saved = self._final_place(state), {}
        for group, frames in self.frames.items():
            final = frames.final.flatten(0, 1)[place].to("cpu", copy=True)
            saved[group] = {**frames.state_dict(fill), "final": final}
        return {**state, "frames": saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        place = self._final_place(state)
        for group, frames in self.frames.items():
            saved = state["frames"][group]
            frames.load_state_dict(saved)
            frames.final.flatten(0, 1)[place] = saved["final"].to(self.device)

    def _final_place(self, state: dict[str, Any]) -> Tensor:
        return state["final_place"][: None if self._has_final else 0].to(self.device)
