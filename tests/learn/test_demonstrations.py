"""Demonstrations: files, replay windows, shares of a batch, errors."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpusim_rl.api import prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.errors import ConfigError
from gpusim_rl.files import checkpoint_file, safe_open
from gpusim_rl.learn import demonstrations
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.demonstrations import Demonstrations, load, make_replay, read, save
from gpusim_rl.run.evaluation import evaluate_run
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.spaces import Box, MultiDiscrete
from helpers.demonstrated import random_demonstrations
from helpers.fakes import RandomEnv
from helpers.off_policy import ACTOR_CRITICS, OffPolicyLearner, settings_of
from helpers.raised import raises
from helpers.training import merged, the_run

GAMMA, CPU = 0.9, torch.device("cpu")
NAMES = {"policy": ["cart_pos[0]", "cart_vel[0]", "pole_angle[0]", "pole_vel[0]"]}
SPEC = EnvSpec(64, {"policy": 4}, Box(1), 500, task="Cartpole", dt=1.0 / 60.0, obs_names=NAMES)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save(tmp_path / "shown.npz", random_demonstrations(SPEC))
    return tmp_path / "shown.npz"


def test_demonstrations_file_round_trips(file: Path) -> None:
    found, digest = read(file)
    assert len(digest) == 64 and found.episodes == 10
    expected = random_demonstrations(SPEC)
    assert (found.task, found.commit, found.dt, found.episode_length, found.num_envs) == ("Cartpole", "", SPEC.dt, 8, 1)
    for name in ("action", "reward", "terminated", "truncated", "diverged", "action_names"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    for name in ("obs", "final_obs", "obs_names"):
        assert np.array_equal(getattr(found, name)["policy"], getattr(expected, name)["policy"]), name


def test_file_over_size_limit_is_not_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstrations, "DEMONSTRATIONS_BYTES", 1000)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="Try fewer episodes"):
        save(file, random_demonstrations(SPEC))
    assert file.read_bytes() == before


def uneven(lengths: list[int], by_time: list[bool]) -> Demonstrations:
    """Return episodes of these lengths, ended by the time limit or the task."""
    shown = random_demonstrations(SPEC, episodes=1, length=sum(lengths))
    ends = np.zeros(sum(lengths), dtype=bool)
    ends[np.cumsum(lengths) - 1] = True
    cut = ends.copy()
    cut[ends] = by_time
    final = {"policy": np.random.default_rng(7).normal(size=(len(lengths), 4)).astype(np.float32)}
    return replace(shown, terminated=ends & ~cut, truncated=cut, final_obs=final)


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("by_time", [[False] * 5, [True] * 5, [True, True, False, True, False]])
def test_replay_holds_windows_of_every_episode(n_step: int, by_time: list[bool]) -> None:
    shown = uneven([9, 1, 4, 1, 9], by_time)
    memory = make_replay(shown, SPEC, ["policy"], n_step=n_step, gamma=GAMMA, device=CPU)
    steps = len(shown.reward)
    found = memory.at(torch.arange(steps - n_step))
    assert (found.weight == 1.0).all()
    episode = np.cumsum(shown.ends) - shown.ends
    for start in range(steps - n_step):
        reward, discount = 0.0, 1.0
        for t in range(start, start + n_step):
            reward += discount * float(shown.reward[t])
            discount *= 0.0 if shown.terminated[t] else GAMMA
            if shown.ends[t]:
                break
        assert torch.equal(found.obs["policy"][start], torch.from_numpy(shown.obs["policy"][start]))
        assert torch.equal(found.action[start], torch.from_numpy(shown.action[start]))
        assert float(found.reward[start]) == pytest.approx(reward, rel=1e-5)
        assert float(found.discount[start]) == pytest.approx(discount, rel=1e-6)
        if discount > 0.0:
            after = shown.final_obs["policy"][episode[start]] if shown.ends[t] else shown.obs["policy"][t + 1]
            assert torch.equal(found.next_obs["policy"][start], torch.from_numpy(after))


def test_diverged_step_has_zero_weight() -> None:
    shown = uneven([3, 3], [False, True])
    diverged = np.arange(6) == 2
    shown = replace(shown, terminated=np.zeros(6, dtype=bool), diverged=diverged)
    memory = make_replay(shown, SPEC, ["policy"], n_step=1, gamma=GAMMA, device=CPU)
    assert memory.at(torch.arange(5)).weight.tolist() == [1, 1, 0, 1, 1]


def test_demonstration_with_zero_weight_is_not_imitated() -> None:
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
    """Write demonstrations for toy envs with every action `value`."""
    spec, obs = EnvSpec(3, {"policy": 5}, Box(3), 1), RandomEnv(150, {"policy": 5}, seed=2).reset()["policy"].numpy()
    action = np.full((150, 3), value, np.float32)
    save(path, random_demonstrations(spec, episodes=150, length=1, obs={"policy": obs}, action=action))
    return path


def learner(name: str, path: Path, *, share: float = 0.5, imitation: float = 0.0, **changes: Any) -> OffPolicyLearner:
    shown = {"demonstrations": {"file": str(path), "share": share, "imitation": imitation}}
    return OffPolicyLearner(name, RandomEnv(8, {"policy": 5}), {**shown, **changes})


@pytest.mark.parametrize("name", ACTOR_CRITICS)
@pytest.mark.parametrize(("share", "count"), [(0.5, 8), (0.001, 1), (0.999, 15)])
def test_every_batch_ends_with_its_share_of_demonstrations(name: str, share: float, count: int, tmp_path: Path) -> None:
    it = learner(name, marked(tmp_path / "d.npz", 0.625), share=share, n_step=2)
    for _ in range(3):
        it.collect()
    for batch in it.algorithm._draw(5):
        assert (batch.action[-count:] == 0.625).all()
        assert (batch.action[:-count] != 0.625).all()
        assert batch.reward.shape == batch.weight.shape == batch.index.shape == (16,)
        assert batch.next_obs["policy"].shape == (16, 5)
        assert float(batch.weight.sum()) == pytest.approx(1.0)


def test_digest_belongs_to_the_demonstrations_read(tmp_path: Path, monkeypatch) -> None:
    path, other, read_bytes = marked(tmp_path / "d.npz", 0.625), marked(tmp_path / "e.npz", 0.5), safe_open.read_bytes
    digest = read(path)[1]

    def read_then_swap(*arguments: Any) -> Any:
        content = read_bytes(*arguments)
        path.unlink()
        path.write_bytes(other.read_bytes())
        return content

    monkeypatch.setattr(safe_open, "read_bytes", read_then_swap)
    assert learner("sac", path).algorithm.state_dict()["demonstrations"] == digest


@pytest.mark.parametrize("name", ACTOR_CRITICS)
def test_batch_rows_stay_aligned(name: str, tmp_path: Path) -> None:
    it = learner(name, marked(tmp_path / "d.npz", 0.625), normalize_obs=False)
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
def test_imitation_pulls_actor_to_demonstrated_actions(name: str, tmp_path: Path) -> None:
    distances = []
    for imitation in (0.0, 50.0):
        it = learner(name, marked(tmp_path / "d.npz", 0.625), imitation=imitation, learning_rate=3e-3)
        it.train(25)
        actions, _ = it.algorithm.policy.act(it.obs, ())
        distances.append(float((actions - 0.625).abs().mean()))
    assert distances[1] < 0.15 < distances[0]


def trainer(name: str, folder: Path, file: Path, **more: Any) -> Trainer:
    cloned = {"horizon": 4, "gradient_steps": 10, "batch_size": 32, "demonstrations": {"file": str(file)}}
    shown = {"demonstrations": {"file": str(file), "imitation": 1.0}}
    settings = {name: cloned if name == "bc" else settings_of(name, shown)}
    quiet = {"num_envs": 8, "max_iterations": 4, "log": {"console": "quiet", "dir": str(folder)}}
    return make_trainer(prepare("Cartpole", algo=name, **merged(quiet, merged(settings, more))))


@pytest.mark.parametrize("name", ["sac", "bc"])
def test_run_resumes_with_demonstrations_and_evaluates_without(
    name: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(name, tmp_path, file).train()
    run = str(the_run(tmp_path))
    if name == "bc":
        with raises(ConfigError, key="bc.demonstrations.file"):
            make_trainer(prepare("Cartpole", checkpoint=run, max_iterations=5))
    shown = {name: {"demonstrations": {"file": str(file)}}}  # paths are not saved in checkpoints
    make_trainer(prepare("Cartpole", checkpoint=run, max_iterations=5, **shown)).train()
    assert "warning: the demonstrations" not in capsys.readouterr().err
    save(file, random_demonstrations(SPEC, seed=1))
    make_trainer(prepare("Cartpole", checkpoint=run, max_iterations=6, **shown)).train()
    assert "warning: the demonstrations" in capsys.readouterr().err
    file.unlink()
    assert evaluate_run(prepare("Cartpole", checkpoint=run, test=True))["episodes"] == 8
    with pytest.raises(ConfigError, match=rf"{name}\.demonstrations\.file: .*shown\.npz"):
        make_trainer(prepare("Cartpole", checkpoint=run, max_iterations=7, **shown))


def changed(file: Path, **arrays: Any) -> Path:
    """Write the file with some arrays replaced, or dropped if None."""
    with np.load(file) as old:
        kept = {**{name: old[name] for name in old.files}, **{name.replace("__", "/"): x for name, x in arrays.items()}}
    path = file.with_name("changed.npz")
    np.savez(path, **{name: array for name, array in kept.items() if array is not None})
    return path


def zeros_with_nan(shape: tuple[int, ...], *place: int) -> np.ndarray:
    array = np.zeros(shape, np.float32)
    array[place] = np.nan
    return array


@pytest.mark.parametrize(
    ("arrays", "line"),
    [
        ({"reward": zeros_with_nan((80,), 5)}, r"reward: .* control step 5$"),
        ({"final_obs__policy": zeros_with_nan((10, 4), 6, 1)}, r"final_obs/policy: .* episode 6, cart_vel\[0\]$"),
        ({"action": zeros_with_nan((80, 1), 79, 0)}, r"action: .* control step 79, action\[0\]$"),
        ({"final_obs__policy": np.zeros((9, 4))}, r"final_obs/policy: expected shape \(10, 4\), got \(9, 4\)"),
        ({"obs__policy": None}, "obs/policy: missing array"),
        ({"truncated": np.zeros(80, bool), "terminated": np.zeros(80, bool)}, "incomplete"),
        ({"truncated": np.zeros(3, bool)}, "truncated.*: expected"),
        ({"reward": np.array(["x"] * 80)}, "reward: expected numbers"),
        ({"task": None}, "task.*gpusim-rl collect"),
        ({"dt": np.array("fast")}, "could not convert"),
        ({"dt": np.array(np.nan)}, "dt: .*nan"),
        ({"reward": np.array([None] * 80, dtype=object)}, "Python objects"),
    ],
)
def test_bad_array_is_rejected_in_one_line(file: Path, arrays: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as error:
        load(str(changed(file, **arrays)), SPEC, ["policy"])
    assert "changed.npz" in str(error.value) and "\n" not in str(error.value)


def test_bad_demonstrations_file_is_rejected(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, pickled, text, empty = (tmp_path / name for name in ("old.pt", "list.npz", "text.npz", "empty.npz"))
    checkpoint_file.save(old, {"demonstrations": {}})
    pickled.write_bytes(pickle.dumps([1]))
    text.write_text("demonstrations")
    empty.touch()
    for path, line in {
        old: "older version. Try gpusim-rl collect",
        pickled: "npz",
        text: "npz",
        empty: "empty",
        tmp_path / "none.npz": "none.npz: No such file",
        tmp_path: "folder",
    }.items():
        with pytest.raises(ConfigError, match=line):
            load(str(path), SPEC, ["policy"])
    save(file, random_demonstrations(SPEC, action_names=np.array(["x" * 20_000])))
    monkeypatch.setattr(demonstrations, "DEMONSTRATIONS_BYTES", file.stat().st_size)
    with pytest.raises(ConfigError, match="unpacked"):
        read(file)
    monkeypatch.setattr(demonstrations, "DEMONSTRATIONS_BYTES", file.stat().st_size - 1)
    with pytest.raises(ConfigError, match="bytes"):
        read(file)


def test_demonstrations_of_another_env_are_rejected(file: Path) -> None:
    names = {"policy": ["cart_pos[0]", "pole_vel[0]", "pole_angle[0]", "cart_vel[0]"]}
    for spec, expected, got in (
        (replace(SPEC, task="Ant"), "Ant", "Cartpole"),
        (replace(SPEC, dt=0.05), "0.05", SPEC.dt),
        (replace(SPEC, obs_sizes={"policy": 5}), "5", 4),
        (replace(SPEC, obs_names=names), "pole_vel[0]", "cart_vel[0]"),
        (replace(SPEC, action_space=Box(2)), "2 continuous", "1 continuous"),
        (replace(SPEC, action_space=MultiDiscrete((3,))), "1 discrete", "1 continuous"),
    ):
        with raises(ConfigError, key=str(file), expected=expected, got=got):
            load(str(file), spec, ["policy"])
    with raises(ConfigError, key=str(file), expected="2", got=0):
        load(str(file), replace(SPEC, obs_sizes={"policy": 4, "critic": 2}), ["policy", "critic"])
    save(file, random_demonstrations(replace(SPEC, action_space=MultiDiscrete((5,)))))
    with raises(ConfigError, key=str(file), expected="0 to n - 1 for n in [3]"):
        load(str(file), replace(SPEC, action_space=MultiDiscrete((3,))), ["policy"])
    with pytest.raises(ConfigError, match="n_step=80"):
        make_replay(read(file)[0], SPEC, ["policy"], n_step=80, gamma=GAMMA, device=CPU)
    with pytest.raises(ConfigError, match=r"replay\.alpha=0"):
        learner("sac", file, replay={"alpha": 0.5})
