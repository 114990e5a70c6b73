"""HumanoidAMP: observations of robot and clips, style history, and checks of clips."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from gpusim_rl.tasks.humanoid_amp import ENDS, PARTS, HumanoidAMP

import gpusim_rl
from gpusim_rl.api import prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.env import VecEnv
from gpusim_rl.env.clip import Clip, load, save
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.training import read_csv, the_run

SIZE = sum(PARTS.values())
FILE = assets_dir() / "motions" / "humanoid_walk.npz"
CYCLE = 30  # period of the walk in frames


def make_env(num_envs: int = 8, **task: Any) -> Any:
    settings = {"randomize_episode_start": False, **task}
    env = gpusim_rl.make_env("HumanoidAMP", num_envs=num_envs, sim="mujoco", device="cpu", task=settings)
    assert isinstance(env, VecEnv) and isinstance(env.task, HumanoidAMP)
    return env


def random_action(env: VecEnv, seed: int = 0) -> torch.Tensor:
    return torch.rand(env.num_envs, 28, generator=torch.Generator().manual_seed(seed)) - 0.5


def test_features_equal_mujoco_quantities() -> None:
    env, random = make_env(), np.random.default_rng(0)
    env.reset()
    model = env.sim.scene.model
    data = mujoco.MjData(model)
    expected = []
    for i in range(env.num_envs):
        data.qpos[:], data.qvel[:] = model.qpos0, random.normal(0.0, 1.0, model.nv)
        mujoco.mju_quatIntegrate(data.qpos[3:7], random.normal(0.0, 0.8, 3), 1.0)
        data.qpos[:2], data.qpos[7:] = random.normal(0.0, 3.0, 2), random.normal(0.0, 0.3, 28)
        mujoco.mj_forward(model, data)
        env.sim.qpos[i], env.sim.qvel[i] = torch.from_numpy(data.qpos), torch.from_numpy(data.qvel)
        pelvis = data.body("humanoid/pelvis")
        turn = pelvis.xmat.reshape(3, 3)
        yaw = np.arctan2(turn[1, 0], turn[0, 0])
        back = np.array([[np.cos(yaw), np.sin(yaw), 0], [-np.sin(yaw), np.cos(yaw), 0], [0, 0, 1]])
        axis = back @ turn[:, 0]
        assert abs(axis[1]) < 1e-9
        ends = [back @ (data.body(f"humanoid/{end}").xpos - pelvis.xpos) for end in ENDS]
        motion = [back @ data.qvel[:3], back @ turn @ data.qvel[3:6]]
        root = [data.qpos[2:3], axis[[0, 2]], back @ turn[:, 2], *motion]
        expected.append(np.concatenate([*root, data.qpos[7:], data.qvel[6:], *ends]))
    env.sim.wrote_state(torch.ones(env.num_envs, dtype=torch.bool))
    env.sim.refresh()
    env.task.advance(torch.zeros(env.num_envs, dtype=torch.bool))
    obs = env.look()
    np.testing.assert_allclose(obs["policy"], np.array(expected), rtol=1e-4, atol=1e-4)
    assert torch.equal(obs["style"][:, SIZE:], obs["policy"])
    assert [term.name for term in env.obs_terms["policy"]] == list(PARTS)


def rows_in(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the indices of rows in a table."""
    distance, index = torch.cdist(rows, table, compute_mode="donot_use_mm_for_euclid_dist").min(dim=1)
    assert distance.max() < 1e-4
    return index


def test_episode_starts_in_clip_with_matching_history() -> None:
    env = make_env(64)
    obs = env.reset()
    table = env.task.features
    before, now = (rows_in(table, part) for part in obs["style"].split(SIZE, dim=1))
    assert ((now - before) % CYCLE == 1).all() and len((now % CYCLE).unique()) > 20
    # The robot has the observed pose with another heading, raised where a foot would be in the ground.
    env.task.advance(torch.zeros(64, dtype=torch.bool))
    seen = env.look()["policy"]
    torch.testing.assert_close(seen[:, 1:], obs["policy"][:, 1:], rtol=1e-3, atol=1e-3)
    assert ((seen[:, 0] - obs["policy"][:, 0]).abs() < 0.003).all()
    heading = torch.atan2(*env.task.robot.root_quat[:, [3, 0]].unbind(dim=1))
    assert heading.std() > 0.5


def test_style_history_is_cleared_at_episode_start() -> None:
    env = make_env(16, episode_length=3, style_frames=3)
    obs = env.reset()
    table, starts = env.task.features, 0
    for number in range(7):
        step = env.step(random_action(env, number))
        assert torch.equal(step.final_obs["style"][:, : 2 * SIZE], obs["style"][:, SIZE:])
        assert torch.equal(step.final_obs["style"][:, 2 * SIZE :], step.final_obs["policy"])
        for row in step.obs["style"][step.done]:
            index = rows_in(table, row.view(3, SIZE))
            assert (index.diff() % CYCLE == 1).all()
            starts += 1
        kept = ~step.done
        assert torch.equal(step.obs["style"][kept], step.final_obs["style"][kept])
        obs = {name: value.clone() for name, value in step.obs.items()}
    assert starts >= 32


def test_references_cover_all_clips_and_never_span_two(tmp_path: Path) -> None:
    other = tmp_path / "other.npz"
    whole = load(FILE)
    part = {
        name: getattr(whole, name)[60:100] for name in Clip.__dataclass_fields__ if "_pos" in name or "_vel" in name
    }
    save(other, replace(whole, **part, body_quat_w=whole.body_quat_w[60:100]))
    env = make_env(256, clips=["humanoid_walk", str(other)])
    first, last = env.reset()["reference"], env.step(random_action(env))
    reference = torch.cat([last.obs["reference"], *(env.step(random_action(env)).obs["reference"] for _ in range(3))])
    assert not torch.equal(first, last.obs["reference"])
    assert torch.equal(last.obs["reference"], last.final_obs["reference"])
    task, lengths = env.task, [121, 20]
    now = task.histories[:, 1].tolist()
    assert now == [*range(1, 121), *range(122, 141)] and len(task.features) == sum(lengths)
    assert torch.equal(task.histories[:, 0], task.histories[:, 1] - 1)
    expected = task.features[task.histories].flatten(1)
    assert len((rows_in(expected, reference) % CYCLE).unique()) == CYCLE


def test_evaluation_accepts_shorter_clip(tmp_path: Path) -> None:
    env, clip = make_env(), load(FILE)
    arrays = {field.name: getattr(clip, field.name) for field in fields(clip)}
    short = {name: value[:60] for name, value in arrays.items() if isinstance(value, np.ndarray)}
    save(tmp_path / "short.npz", replace(clip, **short))
    env.task.reference.fill_(len(env.task.histories) - 1)
    other = make_env(clips=[str(tmp_path / "short.npz")])
    other.reset()
    assert other.begin_from(env.state_dict())["reference"].isfinite().all()
    assert (other.task.reference == len(other.task.histories) - 1).all()


def test_clips_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    clip = load(FILE)
    stranger = tmp_path / "stranger.npz"
    save(stranger, replace(clip, body_names=tuple(name.replace("hand", "fist") for name in clip.body_names)))
    for task, message in (
        ({"clips": []}, r"^task\.clips: .*got \[\]"),
        ({"clips": [str(stranger)]}, "right_hand, left_hand"),
        ({"style_frames": 200}, r"^task\.style_frames: .* 121 .*got 200"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_env(2, **task)


def test_amp_iteration_has_no_device_syncs(tmp_path: Path) -> None:
    small = {"horizon": 4, "minibatch_size": 16, "epochs": 1, "network": {"hidden": [16]}}
    amp = {**small, "discriminator": {"hidden": [16], "replay": 50, "batch_size": 16}}
    log = {"console": "quiet", "dir": str(tmp_path), "interval": 1}
    settings = {"num_envs": 8, "max_iterations": 2, "sim": "mujoco", "device": "cpu", "log": log}
    it: Any = make_trainer(prepare("HumanoidAMP", algo="amp", amp=amp, **settings))
    with it.logging() as log:
        it.iterate(log)
        syncs = SyncCounter()
        for method in ("step", "reset", "refresh", "draw"):  # physics on the host
            setattr(it.env.sim, method, syncs.pause()(getattr(it.env.sim, method)))
        with syncs:
            it.collector.collect()
            it.algorithm.update()
    assert syncs.total == 0, syncs.locations
    [row, *_] = read_csv(the_run(tmp_path))
    assert 0.0 < float(row["amp/style_reward"]) < 2.0 and float(row["task/speed"])
