"""Demonstrations: what is recorded is what happened, a part of each batch is theirs, and bad files are one line."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl.api import make_env, prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.errors import ConfigError
from gpusim_rl.files import checkpoint_file
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.demonstrations import load, record
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.spaces import Box
from gpusim_rl.testing.conformance import differences
from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.fakes import RandomEnv
from helpers.off_policy import ACTOR_CRITICS, OffPolicyLearner, settings_of
from helpers.training import merged, the_run

GAMMA, STEPS, ENVS = 0.9, 30, 4


def push(obs: Any) -> Tensor:
    """Of Cartpole: against the fall."""
    return (3.0 * obs["policy"][:, 2:3] + obs["policy"][:, 3:4]).clamp(-1.0, 1.0)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demonstrations") / "cartpole.pt"
    record(cartpole(), push, path, steps=STEPS)
    return path


def cartpole() -> Any:
    return make_env("Cartpole", num_envs=ENVS, seed=3, sim="mujoco", device="cpu", task={"episode_length": 9})


def loaded(path: Path, n_step: int = 1, size: int = 4, actions: int = 1) -> Any:
    spec = EnvSpec(64, {"policy": size}, Box(actions), 500)
    return load(str(path), spec, ["policy"], n_step=n_step, gamma=GAMMA, device=torch.device("cpu"))[0]


@pytest.mark.parametrize("n_step", [1, 3])
def test_what_is_recorded_is_what_happened(file: Path, n_step: int) -> None:
    env = cartpole()
    obs, steps = env.reset()["policy"].clone(), []
    for _ in range(STEPS):
        action = push({"policy": obs})
        step = env.step(action)
        ends = (step.terminated.clone(), step.done.clone())
        steps.append((obs, action, step.reward.clone(), step.final_obs["policy"].clone(), *ends))
        obs = step.obs["policy"].clone()
    memory = loaded(file, n_step)
    for start in range(STEPS - n_step):
        found = memory.at(torch.arange(ENVS) + start * ENVS)
        assert (found.weight == 1.0).all()
        for n in range(ENVS):
            reward, discount = 0.0, 1.0
            for t in range(start, start + n_step):
                _, _, r, after, terminated, done = (x[n] for x in steps[t])
                reward += discount * float(r)
                discount *= 0.0 if terminated else GAMMA
                if done:
                    break
            seen = (found.obs["policy"][n], found.action[n], found.next_obs["policy"][n])
            if math.isclose(discount, 0.0):
                seen = (*seen[:2], after)  # nothing depends on what follows
            for ours, theirs in zip(seen, (steps[start][0][n], steps[start][1][n], after), strict=True):
                assert torch.equal(ours, theirs)
            assert float(found.reward[n]) == pytest.approx(reward, rel=1e-5)
            assert float(found.discount[n]) == pytest.approx(discount, rel=1e-6)


@pytest.mark.parametrize(("limit", "kept"), [(1.0, 1.0), (10.0, 5.0)])
def test_actions_are_stored_as_the_envs_take_them(tmp_path: Path, limit: float, kept: float) -> None:
    env = make_env("Cartpole", num_envs=ENVS, sim="mujoco", device="cpu", task={"clip_actions": limit})
    record(env, lambda obs: torch.full((ENVS, 1), 5.0), tmp_path / "file.pt", steps=4)
    assert (loaded(tmp_path / "file.pt").at(torch.arange(ENVS)).action == kept).all()


def test_a_demonstration_that_does_not_count_is_not_imitated() -> None:
    it = OffPolicyLearner("sac", RandomEnv(8), {"demonstrations": {"imitation": 1.0}})
    it.collect()
    it.collect()
    sac: Any = it.algorithm
    sac._num_shown, sac._imitates = 2, True
    (batch, *_) = sac._draw(4)
    batch.weight[-1] = 0.0
    mean, q = torch.zeros_like(batch.action), torch.ones(len(batch.weight))
    losses = []
    for action in (0.0, 1.0):
        batch.action[-1] = action
        losses.append(float(sac._imitation(batch, mean, q)))
    assert losses[0] == losses[1] > 0.0


def marked(path: Path, value: float) -> Path:
    """Demonstrations for toy envs: every action is `value`."""
    env = RandomEnv(3, {"policy": 5})
    env.device, env.action_space, env.steps_between_truncations = torch.device("cpu"), Box(3), 1  # type: ignore[attr-defined]
    env.cfg = SimpleNamespace(clip_actions=1.0)  # type: ignore[attr-defined]
    record(env, lambda obs: torch.full((3, 3), value), path, steps=50)  # type: ignore[arg-type]
    return path


def learner(name: str, path: Path, *, share: float = 0.5, imitation: float = 0.0, **changes: Any) -> OffPolicyLearner:
    shown = {"demonstrations": {"file": str(path), "share": share, "imitation": imitation}}
    return OffPolicyLearner(name, RandomEnv(8, {"policy": 5}), {**shown, **changes})


@pytest.mark.parametrize("name", ACTOR_CRITICS)
@pytest.mark.parametrize(("share", "theirs"), [(0.5, 8), (0.25, 4), (0.001, 1), (0.999, 15)])
def test_the_last_part_of_every_batch_is_theirs(name: str, share: float, theirs: int, tmp_path: Path) -> None:
    it = learner(name, marked(tmp_path / "d.pt", 0.625), share=share, n_step=2)
    for _ in range(3):
        it.collect()
    for batch in it.algorithm._draw(5):
        assert (batch.action[-theirs:] == 0.625).all()
        assert (batch.action[:-theirs] != 0.625).all()
        assert batch.reward.shape == batch.weight.shape == batch.index.shape == (16,)
        assert batch.next_obs["policy"].shape == (16, 5)
        assert float(batch.weight.sum()) == pytest.approx(1.0)


def test_the_digest_is_that_of_the_demonstrations_that_were_read(tmp_path: Path, monkeypatch) -> None:
    path, other, open_file = marked(tmp_path / "d.pt", 0.625), marked(tmp_path / "e.pt", 0.5), checkpoint_file.open_file
    digest = path.read_bytes()[-64:].decode()

    def then_swapped(*arguments: Any) -> Any:
        opened = open_file(*arguments)
        path.unlink()
        path.write_bytes(other.read_bytes())
        return opened

    monkeypatch.setattr(checkpoint_file, "open_file", then_swapped)
    assert learner("sac", path).algorithm.state_dict()["demonstrations"] == digest


@pytest.mark.parametrize("name", ACTOR_CRITICS)
def test_a_batch_keeps_its_rows_together(name: str, tmp_path: Path) -> None:
    it = learner(name, marked(tmp_path / "d.pt", 0.625), normalize_obs=False)
    for _ in range(3):
        it.collect()
    for batch in it.algorithm._draw(3):
        memories = (it.algorithm.replay, slice(None, 8)), (it.algorithm.demonstrations, slice(8, None))
        for memory, part in memories:
            assert memory is not None
            again = memory.at(batch.index[part])
            for ours, theirs in ((batch.obs, again.obs), (batch.next_obs, again.next_obs)):
                assert torch.equal(ours["policy"][part], theirs["policy"])
            for ours, theirs in ((batch.action, again.action), (batch.reward, again.reward)):
                assert torch.equal(ours[part], theirs)
            assert torch.equal(batch.discount[part], again.discount)


@pytest.mark.parametrize("name", ACTOR_CRITICS)
def test_imitation_draws_the_actor_to_their_actions(name: str, tmp_path: Path) -> None:
    distances = []
    for imitation in (0.0, 50.0):
        it = learner(name, marked(tmp_path / "d.pt", 0.625), imitation=imitation, learning_rate=3e-3)
        it.train(40)
        actions, _ = it.algorithm.policy.act(it.obs, ())
        distances.append(float((actions - 0.625).abs().mean()))
    assert distances[1] < 0.15 < distances[0]


@pytest.mark.parametrize("name", ACTOR_CRITICS)
def test_no_host_sync(name: str, tmp_path: Path) -> None:
    it = learner(name, marked(tmp_path / "d.pt", 0.625), imitation=1.0)
    for _ in range(2):
        it.collect()
    with SyncCounter() as syncs:
        it.algorithm.update()
    assert syncs.total == 0, syncs.locations


def trainer(name: str, folder: Path, file: Path, **more: Any) -> Trainer:
    settings = {name: settings_of(name, {"demonstrations": {"file": str(file), "imitation": 1.0}})}
    quiet = {"num_envs": 8, "max_iterations": 4, "log": {"console": "quiet", "dir": str(folder)}}
    return make_trainer(prepare("Cartpole", algo=name, **merged(quiet, merged(settings, more))))


def test_a_run_resumes_bit_for_bit_and_is_evaluated_without_the_file(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.pt"
    copy.write_bytes(file.read_bytes())
    trainer("sac", tmp_path / "whole", copy, max_iterations=8).train()
    trainer("sac", tmp_path / "parts", copy).train()
    run = str(the_run(tmp_path / "parts"))
    shown = {"sac": {"demonstrations": {"file": str(copy)}}}  # a path: typed again
    make_trainer(prepare("Cartpole", checkpoint=run, max_iterations=8, **shown)).train()
    ends = [checkpoint_file.load(the_run(tmp_path / x) / "checkpoints" / "last.pt") for x in ("whole", "parts")]
    for part in ("policy", "algorithm"):
        assert differences(ends[0][part], ends[1][part]) == []
    record(cartpole(), push, copy, steps=STEPS + 1)
    make_trainer(prepare("Cartpole", checkpoint=run, max_iterations=9, **shown)).train()
    assert "the demonstrations are not those that the training had before" in capsys.readouterr().err
    copy.unlink()
    assert make_trainer(prepare("Cartpole", checkpoint=run, test=True)).evaluate()["episodes"] == 8
    with pytest.raises(ConfigError, match=r"sac\.demonstrations\.file: cannot read checkpoint .*copy\.pt"):
        make_trainer(prepare("Cartpole", checkpoint=run, max_iterations=10, **shown))


def changed(file: Path, path: Path, **parts: Any) -> Path:
    found = checkpoint_file.load(file)["demonstrations"]
    checkpoint_file.save(path, {"demonstrations": {**found, "memory": {**found["memory"], **parts}}})
    return path


def test_bad_files_are_one_line(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pt"
    checkpoint_file.save(other, {"policy": {}})
    with pytest.raises(ConfigError, match="holds no demonstrations"):
        loaded(other)
    with pytest.raises(ConfigError, match="cannot read checkpoint"):
        loaded(tmp_path / "none.pt")
    with pytest.raises(ConfigError, match=r"do not fit the task: expected obs policy \[30, 4, 5\], got \[30, 4, 4\]"):
        loaded(file, size=5)
    with pytest.raises(ConfigError, match=r"expected action \[30, 4, 2\], got \[30, 4, 1\]"):
        loaded(file, actions=2)
    with pytest.raises(ConfigError, match="30 control steps of each env, and n_step=30 needs more"):
        loaded(file, n_step=30)
    for parts, line in (
        ({"reward": torch.full((STEPS, ENVS), math.nan)}, "a number that is not finite in reward"),
        ({"ends": torch.zeros(2, 2)}, r"expected ends \[30, 4\], got \[2, 2\]"),
        ({"obs": 3}, r"expected obs policy \[30, 4, 4\], got nothing"),
        ({"reward": torch.zeros(7, 4)}, r"expected final_step \[2, 4\]|expected action \[7, 4, 1\]|count 30"),
        ({"total": torch.tensor(-(2**40))}, "count -1099511627776 control steps and have 30"),
        ({"reward": "none"}, "holds no demonstrations"),
        ({"reward": torch.zeros(STEPS, 0)}, "holds no demonstrations"),
    ):
        with pytest.raises(ConfigError, match=line):
            loaded(changed(file, tmp_path / "changed.pt", **parts))
    with pytest.raises(ConfigError, match=r"needs transitions drawn uniformly\. Try replay\.alpha=0"):
        learner("sac", file, replay={"alpha": 0.5})


def test_what_is_not_finite_is_not_written(tmp_path: Path) -> None:
    env = RandomEnv(3, {"policy": 5})
    env.device, env.action_space, env.steps_between_truncations = torch.device("cpu"), Box(3), 1  # type: ignore[attr-defined]
    env.cfg = SimpleNamespace(clip_actions=1.0)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="the demonstrations have a number that is not finite in action"):
        record(env, lambda obs: torch.full((3, 3), math.nan), tmp_path / "d.pt", steps=5)  # type: ignore[arg-type]
    assert not (tmp_path / "d.pt").exists()
