"""Populations: the rules by hand, changes in place, an optimum that moves, and members and files that are lost."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gpusim_rl.distributed.population import (
    OWN,
    Member,
    Record,
    Rules,
    decide,
    drawn,
    mutated,
    newest_records,
    read_population,
    records,
)
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.checkpoint_file import load
from gpusim_rl.learn.algorithm import Algorithm
from helpers.commands import ROOT
from helpers.fakes import Learner, RandomEnv, ppo_config
from helpers.off_policy import OffPolicyLearner

LOG = {"low": 1e-4, "high": 1e-2, "log": True}


def rules(**changes: Any) -> Rules:
    numbers = {
        field.name: float(OWN[field.name]) if "." in OWN[field.name] else int(float(OWN[field.name]))
        for field in dataclasses.fields(Rules)
        if field.name in OWN and field.name not in ("objective", "space")
    }
    return Rules(**{**numbers, "objective": "episode/trimmed_return", "space": {"ppo.learning_rate": LOG}, **changes})


def record(member: int, objective: float | None, rate: float = 1e-3, generation: int = 3) -> Record:
    name = f"m{member:02d}-{generation:06d}.pt"
    settings = {"ppo.learning_rate": rate}
    return Record(member, generation, 30, 3000, objective, settings, (member, generation - 1), 1, name, "")


class Scripted(random.Random):
    """Draws what a test says."""

    def __init__(self, *numbers: float, donor: int = 0) -> None:
        super().__init__(0)
        self.numbers, self.donor = list(numbers), donor

    def random(self) -> float:
        return self.numbers.pop(0)

    def choice(self, seq: Any) -> Any:
        return seq[self.donor]


# The rules

SCORES = [100.0, 90.0, 80.0, 70.0, 60.0, 50.0, 40.0, 10.0]  # of members 0 to 7


def all_of(scores: list[float | None]) -> list[Record]:
    return [record(member, score, rate=1e-3 * (member + 1)) for member, score in enumerate(scores)]


def test_the_worst_eighth_copies_one_of_the_best_third() -> None:
    *others, worst = all_of([*SCORES])
    # ceil(0.125 x 8) = 1 may change, ceil(0.3 x 8) = 3 are copied; 0.4 < 0.5: settings too; 0.9: no mutation
    for donor in range(3):
        found, settings = decide(worst, others, rules(), Scripted(0.4, 0.9, donor=donor))
        assert found.member == donor and settings == others[donor].settings
    with pytest.raises(IndexError):
        decide(worst, others, rules(), Scripted(0.4, 0.9, donor=3))
    found, settings = decide(worst, others, rules(), Scripted(0.6, 0.9))  # 0.6 > 0.5: its own settings
    assert found.member == 0 and settings == worst.settings


def test_all_others_stay_as_they_are_and_draw_nothing() -> None:
    found = all_of([*SCORES])
    for own in found[:-1]:
        others = [record for record in found if record is not own]
        assert decide(own, others, rules(), Scripted()) == (own, own.settings)


@pytest.mark.parametrize(
    ("scores", "copies"),
    [
        ([100.0, 100.0, 100.0, 94.0], True),  # 6 > 0.5 x 0 and 6 > 5 % of 100; std without the worst 20 % (none of 4)
        ([100.0, 100.0, 100.0, 96.0], False),  # 4 < 5
        ([-100.0, -100.0, -100.0, -104.0], False),  # the share is of the absolute value
        ([10.0, 0.0, 10.0, 0.0], True),  # std 5: 10 > 2.5
        ([20.0, 20.0, 20.0, 20.0, -1000.0], True),  # an outlier does not raise the std: without it it is 0
    ],
)
def test_what_is_copied_must_be_clearly_better(scores: list[float], copies: bool) -> None:
    *others, own = all_of([*scores])
    found, settings = decide(own, others, rules(), Scripted(*([0.6] if copies else []), 0.1, 0.9, 0.5))
    assert (found is not own) == copies
    # drawn 0.1 < 0.15: it mutates in both cases; 0.9: down, by 1.1 + 0.5 (1.5 - 1.1) = 1.3
    assert settings["ppo.learning_rate"] == pytest.approx(own.settings["ppo.learning_rate"] / 1.3)


def test_no_score_counts_as_the_worst_and_too_few_scores_decide_nothing() -> None:
    *others, own = all_of([100.0, 90.0, 80.0, 70.0, 60.0, 50.0, 40.0, None])
    assert decide(own, others, rules(), Scripted(0.4, 0.9))[0].member == 0
    few = all_of([100.0, 90.0, 80.0, None, None, None, None, None])  # 3 < 8 / 2
    assert decide(few[-1], few[:-1], rules(), Scripted())[0] is few[-1]
    few[3] = record(3, 1.0)
    assert decide(few[-1], few[:-1], rules(), Scripted(0.4, 0.9))[0].member == 0


def test_a_mutation_multiplies_within_the_range_and_gamma_moves_its_distance_from_1() -> None:
    space = {"ppo.learning_rate": LOG, "ppo.gamma": {"low": 0.9, "high": 0.999}, "x.kind": {"choices": [1, 2, 4]}}
    now = {"ppo.learning_rate": 1e-3, "ppo.gamma": 0.99, "x.kind": 2}
    up = mutated(now, space, 0.15, Scripted(0.1, 0.1, 0.25, 0.1, 0.1, 0.5, 0.1, 0.1))
    assert up["ppo.learning_rate"] == pytest.approx(1.2e-3)  # 1.1 + 0.25 x 0.4
    assert up["ppo.gamma"] == pytest.approx(1.0 - 0.01 * 1.15)  # 1.1 + 0.5 x 0.1
    assert up["x.kind"] == 4
    down = mutated(now, space, 0.15, Scripted(0.1, 0.9, 1.0, 0.1, 0.9, 1.0, 0.1, 0.9))
    assert down["ppo.learning_rate"] == pytest.approx(1e-3 / 1.5)
    assert down["ppo.gamma"] == pytest.approx(1.0 - 0.01 / 1.2) and down["x.kind"] == 1
    assert mutated(now, space, 0.15, Scripted(0.15, 0.2, 0.9)) == now
    ends = {"ppo.learning_rate": 9e-3, "ppo.gamma": 0.901, "x.kind": 4}
    ends = mutated(ends, space, 1.0, Scripted(0.1, 0.1, 1.0, 0.1, 0.1, 1.0, 0.1, 0.1))
    assert ends == {"ppo.learning_rate": 1e-2, "ppo.gamma": 0.9, "x.kind": 4}


def test_members_begin_within_the_space() -> None:
    for seed in range(50):
        found = drawn({"a": LOG, "b": {"low": 2.0, "high": 3.0}, "c": {"choices": ["x", "y"]}}, random.Random(seed))
        assert 1e-4 <= found["a"] <= 1e-2 and 2.0 <= found["b"] <= 3.0 and found["c"] in ("x", "y")


def test_only_records_of_generations_that_are_over_for_oneself_count(tmp_path: Path) -> None:
    import json

    for generation in (1, 2, 3):
        one = record(0, 1.0, generation=generation)
        (tmp_path / one.name).write_text(json.dumps(dataclasses.asdict(one)))
    assert newest_records(tmp_path, 2)[0].generation == 2
    (tmp_path / record(0, 1.0, generation=2).name).write_text('{"member": 0, "gener')
    assert newest_records(tmp_path, 2)[0].generation == 1  # a torn one is as if it were not there
    assert [one.generation for one in records(tmp_path)] == [1, 3]


# Changes in place

OTHER = {
    "learning_rate": 3e-3,
    "gamma": 0.9,
    "gae_lambda": 0.7,
    "value_coef": 5.0,
    "entropy_coef": 0.3,
    "bounds_coef": 10.0,
    "clip": 0.01,
    "kl_threshold": 1e-5,
    "target_entropy": -1.5,
}


def make(algo: str, **changes: Any) -> Any:
    if algo == "ppo":
        return Learner(RandomEnv(8, {"policy": 5}), ppo_config(minibatch_size=32, epochs=2, **changes))
    return OffPolicyLearner(algo, RandomEnv(8, {"policy": 5}), {"n_step": 3, **changes})


def algorithm_of(learner: Any) -> Algorithm:
    return learner.ppo if isinstance(learner, Learner) else learner.algorithm


def weights_after(learner: Any, iterations: int = 4) -> torch.Tensor:
    learner.train(iterations)
    return torch.cat([p.detach().flatten() for p in algorithm_of(learner).policy.parameters()])


@pytest.mark.parametrize(
    ("algo", "name"),
    [
        *(("ppo", name) for name in OTHER if name != "target_entropy"),
        *(("sac", name) for name in ("learning_rate", "gamma", "target_entropy")),
        *((algo, name) for algo in ("td3", "dqn") for name in ("learning_rate", "gamma")),
    ],
)
def test_a_change_in_place_is_the_same_bits_as_building_with_the_value(algo: str, name: str) -> None:
    changed = make(algo)
    places = {key: x.data_ptr() for key, x in vars(algorithm_of(changed)).items() if isinstance(x, torch.Tensor)}
    algorithm_of(changed).change({name: OTHER[name]})
    after, fresh, before = weights_after(changed), weights_after(make(algo, **{name: OTHER[name]})), make(algo)
    assert torch.equal(after, fresh)
    if name != "bounds_coef":  # no mean is beyond the bounds here
        assert not torch.equal(after, weights_after(before))
    now = {key: x.data_ptr() for key, x in vars(algorithm_of(changed)).items() if key in places}
    assert now == places  # a graph finds them


def test_the_linear_schedule_follows_a_change() -> None:
    learner = make("ppo", schedule="linear")
    learner.train(1)
    learner.ppo.change({"learning_rate": 0.5})
    learner.collect()
    learner.update()
    assert learner.ppo.learning_rate.item() == pytest.approx(0.5 * (1.0 - 1 / learner.max_iterations))


def test_what_can_change_is_a_setting() -> None:
    from gpusim_rl.learn.algorithm import load_algorithm_class
    from gpusim_rl.settings.schema import ALGORITHMS

    for target, settings in ALGORITHMS.values():
        names = {field.name for field in dataclasses.fields(settings) if field.init}
        assert set(load_algorithm_class(target).tunable) <= names


# An optimum that moves


@dataclasses.dataclass(frozen=True)
class TrackerConfig:
    learning_rate: float


class Tracker(Algorithm):
    """Follows targets that it sees with noise, by x += rate (seen - x). The best rate is Kalman's gain."""

    Config = TrackerConfig
    tunable = ("learning_rate",)

    def __init__(self, rate: float, seed: int) -> None:
        self.cfg, self.policy = TrackerConfig(rate), nn.ParameterDict({"x": torch.zeros(512)})  # type: ignore
        self.learning_rate, self.target = torch.tensor(rate), torch.zeros(512)
        self.generators = (torch.Generator().manual_seed(seed),)

    def _write_settings(self, changed: Any) -> None:
        self.learning_rate.fill_(self.cfg.learning_rate)

    @torch.no_grad()
    def follow(self, walk: float) -> float:
        """Mean of -(x - target)^2 over some steps of targets that walk so far in each."""
        x, [generator], errors = self.policy["x"], self.generators, []
        for _ in range(40):
            walked, noise = torch.randn(2, 512, generator=generator)
            self.target += walk * walked
            x += self.learning_rate * (self.target + noise - x)
            errors.append((x - self.target).square().mean())
        return -torch.stack(errors[20:]).mean().item()

    def act(self, obs: Any) -> Any: ...

    def record(self, action: Any, step: Any) -> None: ...

    def update(self) -> Any: ...

    @classmethod
    def make_policy(cls, cfg: Any, obs_sizes: Any, action_space: Any) -> Any: ...

    def state_dict(self) -> dict[str, Any]:
        return {"target": self.target.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.target.copy_(state["target"])


class Run:
    """As much of a trainer as a member sees."""

    complete = False

    def __init__(self, folder: Path, number: int, shared: Rules, rate: float) -> None:
        self.algorithm, self.seed, self.iteration, self.env_steps = Tracker(rate, number), number, 0, 0
        self.member = Member(folder, number, shared)
        self.log: Any = SimpleNamespace(console=SimpleNamespace(info=lambda text: None, warn=pytest.fail))
        self.member.begin(self, None)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.algorithm.policy.state_dict(), "algorithm": self.algorithm.state_dict()}

    def iterate(self, walk: float) -> None:
        score = self.algorithm.follow(walk)
        self.iteration, self.env_steps = self.iteration + 1, self.env_steps + 100
        row: Any = SimpleNamespace(numbers={"score": score})
        self.member.after_iteration(self, [row], self.log)  # type: ignore[arg-type]


def gain(walk: float) -> float:
    """Kalman's for noise of 1: K^2 / (1 - K) = walk^2."""
    return 0.5 * (-(walk**2) + math.sqrt(walk**4 + 4.0 * walk**2))


def test_a_population_follows_the_best_learning_rate(tmp_path: Path) -> None:
    space = {"tracker.learning_rate": {"low": 1e-3, "high": 1.0, "log": True}}
    numbers = {"interval": 100, "start_after": 0, "initial_delay": 0, "objective": "score", "keep": 2}
    shared = rules(population=8, worst=0.4, better_share=0.0, mutate=0.9, space=space, **numbers)
    begin = [1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.2, 0.4, 0.9]
    runs = [Run(tmp_path, number, shared, rate) for number, rate in enumerate(begin)]
    reached = []
    for walk in (1.0, 0.05):  # the best rate: 0.62, then 0.049
        for _ in range(40):
            for run in runs:
                run.iterate(walk)
        best = max(newest_records(tmp_path, 10**6).values(), key=lambda record: record.score)
        reached.append(best.settings["tracker.learning_rate"])
        assert gain(walk) / 2.0 < reached[-1] < gain(walk) * 2.0, (reached, gain(walk))
    for run in runs:
        assert run.algorithm.learning_rate.item() == pytest.approx(run.member.settings["tracker.learning_rate"])
    assert any(one.parent[0] != one.member for one in records(tmp_path))
    assert len(list(tmp_path.glob("m00-*.pt"))) == 2 and len(list(tmp_path.glob("m00-*.json"))) == 80


def test_a_restart_goes_on_where_the_member_was(tmp_path: Path) -> None:
    shared = rules(interval=100, space={"tracker.learning_rate": LOG}, objective="score")
    run = Run(tmp_path, 0, shared, 1e-3)
    run.iterate(1.0)
    run.member._changed_at = 100
    again = Run(tmp_path, 0, shared, 5e-3)
    again.member.begin(again, run.member.state_dict())  # type: ignore[arg-type]
    assert again.member.state_dict() == run.member.state_dict()  # what start_after is counted from, too
    assert again.algorithm.learning_rate.item() == pytest.approx(1e-3)


# The command

SMALL = (
    "task=Cartpole",
    "method=pbt",
    "population=4",
    "study=poles",
    "device=cpu",
    "num_envs=32",
    "ppo.minibatch_size=256",
    "interval=1000",
    "start_after=0",
    "initial_delay=1000",
    "worst=0.5",
)


@pytest.mark.parametrize(
    ("words", "space", "said"),
    [
        (["space=my.yaml"], "ppo.learning_rat: {low: 1.0, high: 2.0}", "Did you mean 'ppo.learning_rate'"),
        (
            ["space=my.yaml"],
            "ppo.horizon: {choices: [8, 16]}",
            "ppo.horizon cannot change during a training of algo=ppo",
        ),
        (["space=my.yaml", "algo=sac"], "sac.tau: {low: 0.01, high: 0.1}", "sac.learning_rate, sac.gamma"),
        (["space=my.yaml", "algo=sac"], "sac.target_entropy: {low: -9.0, high: -1.0}", "sac.target_entropy is null"),
        (["populatoin=4"], "", "unknown key 'populatoin'. Did you mean 'population'?"),
        (["trials=4"], "", "method=pbt has no trials. It has: method, population"),
        (["population=1"], "", "population must be at least 2"),
        (["interval=0"], "", "interval must be a positive int, got '0'"),
        (["worst=1.5"], "", "worst must be a number in [0, 1], got '1.5'"),
        (["members=2-9"], "", "members must be such as 0-3"),
        (["pbt.enabled=true"], "", "tools/tune.py method=pbt"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: Any, words: Any, space: str, said: str):
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(space)
    with pytest.raises(ConfigError) as error:
        read_population(["task=Cartpole", *words])
    assert said in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["my.yaml"]


def test_members_are_divided_between_commands_and_gpus(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = read_population(["task=Cartpole", "members=2-3", "population=4", "seed=7"])
    assert found.members == [2, 3] and (found.rules.interval, found.rules.keep) == (10_000_000, 25)
    assert found.words(2, None) == found.words(2, None) != found.words(3, None)
    assert {"seed=9", "pbt.member=2"} <= set(found.words(2, None))
    assert not any("learning_rate" in word for word in found.words(0, None))  # the first is as configured
    several = dataclasses.replace(found, gpus=2)
    assert [word for word in several.words(3, None) if word.startswith("device")] == ["device=cuda:1"]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "tools" / "tune.py"), *SMALL, *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(process: subprocess.Popen[str], condition: Any) -> None:
    end = time.monotonic() + 120.0
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.01)


@pytest.mark.slow
def test_a_killed_member_and_torn_files_do_not_stop_a_population(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "poles"
    process = start(tmp_path, "max_iterations=150")
    wait_for(process, lambda: all(list(folder.glob(f"m{member:02d}-000004.json")) for member in range(4)))
    [lock] = [file for file in tmp_path.glob("runs/poles.01/*/lock") if not file.parent.is_symlink()]
    torn = sorted(folder.glob("m02-*.pt"))
    for file in torn:
        file.write_bytes(file.read_bytes()[:1000])
    (folder / "m03-000003.json").write_text('{"member": 3, "genera')
    found = re.match(r"process (\d+) ", lock.read_text())
    assert found is not None
    os.kill(int(found[1]), signal.SIGKILL)
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    assert "member 1 ended (SIGKILL): it is started again" in err and "m03-000003.json is left out" in err
    for member in range(4):
        last = [f for f in tmp_path.glob(f"runs/poles.{member:02d}/*/checkpoints/last.pt") if "latest" not in f.parts]
        assert max(load(file)["iteration"] for file in last) == 150
    with (folder / "population.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert {row["member"] for row in table} == {"0", "1", "2", "3"} and "4 members" in out
    assert any(row["parent_member"] != row["member"] for row in table)
    assert (folder / "lineage.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_member_that_stalls_is_started_again(tmp_path: Path) -> None:
    process = start(tmp_path, "max_iterations=60", "population=2", "stall_s=15")
    wait_for(process, lambda: [*tmp_path.glob("runs/poles.01/2*/metrics.csv")])
    [lock] = [file for file in tmp_path.glob("runs/poles.01/2*/lock")]
    found = re.match(r"process (\d+) ", lock.read_text())
    assert found is not None
    os.kill(int(found[1]), signal.SIGSTOP)
    _, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert "member 1 ended (no row of metrics for 15 s): it is started again" in err
    last = [file for file in tmp_path.glob("runs/poles.01/2*/checkpoints/last.pt")]
    assert max(load(file)["iteration"] for file in last) == 60


@pytest.mark.slow
def test_ctrl_c_ends_all_members_with_checkpoints_and_the_same_command_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "poles"
    process = start(tmp_path, "max_iterations=100000")
    wait_for(process, (folder / "03.log").exists)
    twice = start(tmp_path, "members=3")
    _, err = twice.communicate(timeout=60)
    assert twice.returncode == 2 and "another command trains member 3. Try members=<others>, of 0 to 3" in err
    wait_for(process, lambda: len(list(folder.glob("m*-000001.json"))) == 4)  # all have begun
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in err
    assert "stopped: runs/poles has what there is, and the same command goes on" in err
    assert re.search(r"^generation \d+  member \d  [\d.]+$", err, re.MULTILINE), err
    saved = {f: load(f)["iteration"] for f in tmp_path.glob("runs/poles.0*/2*/checkpoints/last.pt")}
    assert len(saved) == 4 and min(saved.values()) > 0
    other = start(tmp_path, "best=0.4")
    assert "the population has best=0.3, got 0.4" in other.communicate(timeout=60)[1] and other.returncode == 2
    iterations = max(saved.values()) + 20
    again = start(tmp_path, f"max_iterations={iterations}")
    again.communicate(timeout=200)
    assert again.returncode == 0
    assert [load(f)["iteration"] for f in saved] == [iterations] * 4  # in the same folders
