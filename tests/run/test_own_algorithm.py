"""Tests of custom algorithms, networks and extensions with the files of docs/algorithms.md."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

import gpusim_rl
from gpusim_rl.api import prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.distributed.data_parallel import joined
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.networks import ActorCritic, make_features
from gpusim_rl.run.evaluation import evaluate_run
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.testing.algorithm_conformance import AlgorithmConformance
from gpusim_rl.view.player import Player
from helpers.commands import ROOT
from helpers.raised import raises
from helpers.training import SMALL_PPO, assert_same_run, differences, final_state, read_csv, the_run

DOCUMENT = (ROOT / "docs" / "algorithms.md").read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the files of the document to the working directory."""
    files = re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", DOCUMENT, re.DOTALL)
    expected = {
        "my_cfg/algo/search.yaml",
        "my_cfg/algo/calm_ppo.yaml",
        "my_search.py",
        "my_network.py",
        "calm.py",
        "smooth.py",
        "test_my_algorithms.py",
    }
    assert {name for name, _ in files} == expected | {"controller.py"}
    for name, content in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_search", "my_network", "my_net", "calm", "smooth", "test_my_algorithms"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def trainer(**settings: Any) -> Trainer:
    quiet = {"num_envs": 64, "log": {"console": "quiet"}, "config_dir": "my_cfg", "algo": "search"}
    return make_trainer(prepare("Cartpole", **{**quiet, **settings}))


@pytest.mark.slow
def test_custom_algorithm_learns(folder: Path) -> None:
    long = trainer(num_envs=512, max_iterations=40, seed=1)
    first, last = None, long.train()
    rows = read_csv(the_run(folder / "runs"))
    first = float(next(row["episode/return"] for row in rows if row["episode/return"]))
    assert last["episode/return"] > 3.0 * first > 0.0 and long.algorithm.policy.weight.abs().sum() > 0
    assert {"search/earned", "search/spread"} <= rows[-1].keys()


def test_custom_algorithm_resumes_bit_identically(folder: Path) -> None:
    whole = trainer(max_iterations=6, log={"console": "quiet", "dir": "whole"})
    whole.train()
    trainer(max_iterations=3).train()
    run = the_run(folder / "runs")
    # the run folder names the algorithm; the user must trust its code
    with pytest.raises(ConfigError, match=r"algo\._target_=my_search\.RandomSearch would run code"):
        prepare("Cartpole", checkpoint=str(run))
    resumed = make_trainer(prepare("Cartpole", checkpoint=str(run), max_iterations=6, config_dir="my_cfg"))
    assert type(resumed.algorithm).__name__ == "RandomSearch" and resumed.iteration == 3
    resumed.train()
    assert_same_run(folder / "whole", folder / "runs", "/config")


def test_trained_policy_is_evaluated_and_played(folder: Path) -> None:
    trainer(max_iterations=2).train()
    run = str(the_run(folder / "runs"))
    result = evaluate_run(prepare("Cartpole", checkpoint=run, test=True, trust=True))
    assert result["episodes"] == 64 and result["length_mean"] >= 1
    player = Player.open(run, num_envs=3, config_dir="my_cfg")
    state = torch.load(f"{run}/checkpoints/last.pt", weights_only=True)
    expected = player.obs["policy"] @ state["policy"]["weight"]
    assert torch.equal(player.choose(), expected) and player.step().reward.shape == (3,)
    player.close()


@pytest.mark.parametrize("check", [name for name in vars(AlgorithmConformance) if name.startswith("test_")])
def test_custom_algorithm_passes_conformance_suite(folder: Path, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = module("test_my_algorithms").TestMyAlgorithms()
    assert suite.names() == ["search"] and suite.settings["search"]["horizon"] == 8
    more: Any = {"test_iteration_runs_on_meta_tensors": [monkeypatch]}
    getattr(suite, check)("search", *more.get(check, []))


def test_algorithm_class_trains_without_a_yaml(folder: Path) -> None:
    algorithm = module("my_search").RandomSearch
    quiet = {"num_envs": 8, "max_iterations": 2, "log": {"console": "quiet"}}
    gpusim_rl.train("Cartpole", algo=algorithm, random_search={"noise": 0.1}, **quiet)
    run = the_run(folder / "runs")
    assert prepare("Cartpole", checkpoint=str(run), trust=True).algorithm_class is algorithm
    resumed = make_trainer(
        prepare("Cartpole", checkpoint=str(run), max_iterations=3, algo=algorithm, random_search={"noise": 0.1})
    )
    assert isinstance(resumed.algorithm, algorithm) and resumed.cfg.algorithm.noise == 0.1
    assert resumed.train()["iteration"] == 3
    with pytest.raises(ConfigError, match=r"Did you mean 'random_search.noise'\?"):
        prepare("Cartpole", algo=algorithm, random_search={"nois": 0.1})


def test_mistakes_of_a_custom_algorithm_are_reported(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"'serch'.* Did you mean 'search'\?"):
        trainer(algo="serch")
    with raises(ConfigError, key="search.noise", got="much"):
        trainer(search={"noise": "much"})
    with pytest.raises(ConfigError, match=r"^ppo\.gamma .* Try algo=ppo"):
        prepare("Ant", config_dir="my_cfg", algo="search", ppo={"gamma": 0.9})
    yaml = folder / "my_cfg" / "algo" / "search.yaml"
    yaml.write_text(yaml.read_text().replace("my_search.RandomSearch", "my_search.LinearPolicy"))
    with pytest.raises(ConfigError, match=r"^algo\._target_=my_search.LinearPolicy: .*gpusim_rl.Algo"):
        trainer()


def test_plain_dataclass_config_gets_default_declarations(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_algorithm(folder, "SearchConfig(AlgorithmConfig)", "SearchConfig")
    edit_algorithm(folder, "    structure = policy_structure = ()", "    ")
    trainer(num_envs=8, max_iterations=1).train()
    run = str(the_run(folder / "runs"))
    resumed = make_trainer(prepare("Cartpole", checkpoint=run, max_iterations=2, trust=True))
    assert resumed.train()["iteration"] == 2
    with pytest.raises(ConfigError, match=r"search\.horizon: saved 32, now 16"):
        make_trainer(prepare("Cartpole", checkpoint=run, max_iterations=3, search={"horizon": 16}, trust=True))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(ConfigError, match=r"^multi_gpu=true: "):
        joined(prepare("Cartpole", config_dir="my_cfg", algo="search", multi_gpu=True)).__enter__()


def test_variant_yaml_keeps_the_section_of_its_algorithm(folder: Path) -> None:
    (folder / "my_cfg" / "algo" / "slow.yaml").write_text(
        "# @package _global_\ndefaults: [ppo, _self_]\nppo: {learning_rate: 1.0e-5}\n"
    )
    spec = prepare("Cartpole", config_dir="my_cfg", algo="slow", network=module("my_network").Residual)
    assert spec.cfg.algo == "ppo" and spec.cfg.algorithm.learning_rate == 1e-5
    assert spec.cfg.algorithm.network._target_ == "my_network.Residual"


def test_yaml_without_package_header_is_rejected(folder: Path) -> None:
    yaml = folder / "my_cfg" / "algo" / "search.yaml"
    yaml.write_text(yaml.read_text().partition("\n")[2])
    with pytest.raises(ConfigError, match="# @package _global_"):
        trainer()


def edit_algorithm(folder: Path, old: str, new: str) -> None:
    """Replace text in the algorithm of the document."""
    file = folder / "my_search.py"
    content = file.read_text()
    assert old in content
    file.write_text(content.replace(old, new))


@pytest.mark.parametrize(
    ("value", "kind", "path"),
    [
        ("self", "my_search.RandomSearch", "algorithm/own"),
        ("__import__('numpy').float64(1)", "numpy.float64", "algorithm/own"),
        ("[0, {'a': print}]", "builtin_function_or_method", "algorithm/own/1/a"),
    ],
)
def test_unsupported_state_is_rejected_at_start(folder: Path, value: str, kind: str, path: str) -> None:
    edit_algorithm(folder, 'return {"tried"', f'return {{"own": {value}, "tried"')
    own = trainer(num_envs=8, max_iterations=1)
    with pytest.raises(ConfigError, match=re.escape(f"{kind} at {path}")):
        own.train()
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("returned", "key", "expected"),
    [
        ("1.0", "", "a dict of tensors by name"),
        ('{"search/earned": self.earned}', "['search/earned']", "a tensor of shape [] on cpu"),
        ('{"earned": mean}', "", "names such as 'search/earned'"),
    ],
)
def test_invalid_update_metrics_are_rejected(folder: Path, returned: str, key: str, expected: str) -> None:
    edit_algorithm(folder, 'return {"search/earned": mean, "search/spread": spread}', f"return {returned}")
    with raises(ConfigError, key=f"RandomSearch.update(){key}", expected=expected):
        trainer(num_envs=8, max_iterations=1).train()


def test_missing_method_is_rejected(folder: Path) -> None:
    edit_algorithm(folder, "def record(self", "def recrod(self")
    with pytest.raises(ConfigError, match=r"RandomSearch .*'recrod': did you mean 'record'\?"):
        trainer()


PPO = {"num_envs": 8, "max_iterations": 2, "log": {"console": "quiet"}, "ppo": SMALL_PPO}


def test_network_by_class_path_trains_resumes_and_plays(folder: Path) -> None:
    settings = {**PPO, "ppo": {**SMALL_PPO, "network": {"hidden": [24], "_target_": "my_network.Residual"}}}
    own = make_trainer(prepare("Cartpole", **settings))
    policy = own.algorithm.policy
    assert isinstance(policy, ActorCritic) and isinstance(policy.actor.layers, module("my_network").Residual)
    before = policy.actor.layers.second.weight.clone()
    own.train()
    assert not torch.equal(before, policy.actor.layers.second.weight), "weights change"
    run = str(the_run(folder / "runs"))
    with pytest.raises(ConfigError, match=r"ppo\.network\._target_=my_network\.Residual would run code"):
        prepare("Cartpole", checkpoint=run)
    assert prepare("Cartpole", checkpoint=run, ppo={"network": {"_target_": "my_network.Residual"}})
    again = {"network": module("my_network").Residual}  # class in place of its path
    resumed = make_trainer(prepare("Cartpole", checkpoint=run, max_iterations=3, **again))
    assert differences(resumed.algorithm.policy.state_dict(), policy.state_dict()) == []
    resumed.train()
    player = Player.open(run, trust=True)
    player.step()
    player.close()


def test_network_class_is_accepted_as_argument(folder: Path) -> None:
    residual = module("my_network").Residual
    own = make_trainer(
        prepare("Cartpole", network=residual, **{**PPO, "ppo": {**SMALL_PPO, "network": {"rnn": "gru"}}})
    )
    actor: Any = own.algorithm.policy.actor
    assert isinstance(actor.layers, residual) and actor.layers.first.in_features == 256, "after the recurrent layer"
    assert own.start.spec.config["ppo"]["network"]["_target_"] == "my_network.Residual"

    class Local(residual):
        pass

    with pytest.raises(ConfigError, match=r"^network=Local: .*top level"):
        prepare("Cartpole", network=Local)


NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, size, cfg):
        super().__init__()
        self.out_size = 4
        self.layer, self.norm = nn.Linear(size, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.layer(x)) + torch.rand(())
"""


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("self.out_size = 4", "pass", "requires an int attribute out_size"),
        ("return", "return 1,", r".*\[2, 4\]\. Expected .*, got 'tuple'"),
        ("= 4\n", "= size + cfg\n", r"Net\(size, cfg\) failed: unsupported operand .* at my_net\.py:8\. .*size=4"),
    ],
)
def test_invalid_network_is_rejected(folder: Path, old: str, new: str, line: str) -> None:
    assert old in NET
    (folder / "my_net.py").write_text(NET.replace(old, new))
    with pytest.raises(ConfigError, match=rf"^ppo\.network\._target_=my_net\.Net: {line}"):
        make_trainer(prepare("Cartpole", **{**PPO, "ppo": {"network": {"_target_": "my_net.Net"}}}))


def test_network_that_is_not_a_module_is_rejected(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^ppo\.network\._target_=os\.path\.join: .*torch\.nn\.Module"):
        make_trainer(prepare("Cartpole", **{**PPO, "ppo": {"network": {"_target_": "os.path.join"}}}))


def test_network_check_has_no_side_effects(folder: Path) -> None:
    (folder / "my_net.py").write_text(NET)
    net = module("my_net").Net
    torch.manual_seed(3)
    plain = net(4, None)
    expected = torch.rand(3)
    torch.manual_seed(3)
    cfg: Any = prepare("Cartpole", network=net).cfg.algorithm.network
    checked = make_features(4, cfg)
    assert torch.equal(torch.rand(3), expected)
    assert (
        differences(checked.state_dict(), plain.state_dict()) == []
        and checked.training
        and checked.get_submodule("norm").training
    )


SUBCLASSES = """
from dataclasses import dataclass
from gpusim_rl.learn.ppo import PPO
from gpusim_rl.learn.sac import SAC
from gpusim_rl.settings.schema import SACConfig

class MyPPO(PPO): pass
class MySAC(SAC): pass

@dataclass(frozen=True, slots=True, kw_only=True)
class OwnConfig(SACConfig):
    own: float = 1.0

class OwnSAC(SAC):
    Config = OwnConfig
    def actor_loss(self, batch):
        loss, *numbers = super().actor_loss(batch)
        return [loss + self.cfg.own, *numbers]
"""
FAMILIES = {"ppo": "ppo", "sac": "actor_critic"}
SHORT: dict[str, dict[str, Any]] = {
    "ppo": {"minibatch_size": 64, "network": {"hidden": [16]}},
    "sac": {"horizon": 4, "batch_size": 16, "learning_starts": 16, "replay": {"capacity": 400}},
}


@pytest.fixture
def equal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Trivial subclasses with their own yamls."""
    monkeypatch.delitem(sys.modules, "my_equal", raising=False)
    (folder / "my_equal.py").write_text(SUBCLASSES)
    for name, family in FAMILIES.items():
        own = yaml.safe_load((ROOT / "cfg" / "algo" / f"{name}.yaml").read_text())
        lines = {"defaults": [f"/learn/{family}@my_{name}", "_self_"], f"my_{name}": own[name]}
        lines["algo"] = {"name": f"my_{name}", "_target_": f"my_equal.My{name.upper()}"}
        (folder / f"my_cfg/algo/my_{name}.yaml").write_text("# @package _global_\n" + yaml.safe_dump(lines))
    return module("my_equal")


def prepared(task: str = "Ant", **settings: Any) -> Any:
    return prepare(task, config_dir="my_cfg", **settings).cfg


@pytest.mark.parametrize("name", ["ppo", pytest.param("sac", marks=pytest.mark.slow)])
def test_algorithm_subclass_inherits_tuned_values_of_the_task(name: str, equal: ModuleType) -> None:
    base, by_yaml = prepared(algo=name), prepared(algo=f"my_{name}")
    by_class = prepared(algo=getattr(equal, f"My{name.upper()}"))
    assert by_yaml.algorithm == base.algorithm and by_yaml.max_iterations == base.max_iterations
    assert by_class.max_iterations == base.max_iterations
    assert {key: getattr(by_class.algorithm, key) for key in ("network", "horizon")} == {
        key: getattr(base.algorithm, key) for key in ("network", "horizon")
    }


def test_overrides_and_task_yaml_win_over_inherited_tuned_values(equal: ModuleType, folder: Path) -> None:
    typed = prepared(algo="my_ppo", my_ppo={"epochs": 7, "network": {"hidden": [8]}}).algorithm
    assert (typed.epochs, typed.network.hidden, typed.value_coef) == (7, [8], 2.0)
    (folder / "my_cfg/task").mkdir()
    lines = "# @package _global_\ndefaults: [Ant, _self_]\nmy_ppo: {epochs: 9}\n"
    (folder / "my_cfg/task/MyAnt.yaml").write_text(lines)
    own = prepared("MyAnt", algo="my_ppo").algorithm
    assert (own.epochs, own.minibatch_size) == (9, 32768)


def test_subclass_config_defaults_win_over_base_defaults(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "my_calm", raising=False)
    text = """
from dataclasses import dataclass
from gpusim_rl.learn.ppo import PPO
from gpusim_rl.settings.schema import PPOConfig

@dataclass(frozen=True, slots=True, kw_only=True)
class CalmConfig(PPOConfig):
    learning_rate: float = 0.0123
    value_coef: float = 9.0

class Calm(PPO):
    Config = CalmConfig
"""
    (folder / "my_calm.py").write_text(text)
    subclass = prepared("Ant", algo=module("my_calm").Calm).algorithm
    base = prepared("Ant", algo="ppo").algorithm
    untuned = prepared("Pendulum", algo=module("my_calm").Calm).algorithm
    assert untuned.value_coef == 9.0 and subclass.value_coef == base.value_coef, "tuned values of the task win"


@pytest.mark.parametrize("name", ["ppo", pytest.param("sac", marks=pytest.mark.slow)])
def test_trivial_subclass_trains_bit_identically(name: str, equal: ModuleType, folder: Path) -> None:
    rows = []
    for algo in (name, f"my_{name}"):
        settings: dict[str, Any] = {"algo": algo, "num_envs": 8, "max_iterations": 4, algo: SHORT[name]}
        it = make_trainer(prepare("Ant", config_dir="my_cfg", log={"console": "quiet", "dir": algo}, **settings))
        it.train()
        rows.append((read_csv(the_run(folder / algo)), it.algorithm.policy.state_dict()))
    assert rows[0][0] == rows[1][0] and differences(rows[0][1], rows[1][1]) == []


@pytest.mark.parametrize(("algo", "named"), [("search", True), ("my_ppo", False)])
def test_banner_names_algorithms_with_tuned_values(
    algo: str, named: bool, equal: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    make_trainer(prepare("Ant", config_dir="my_cfg", algo=algo, num_envs=2, max_iterations=1)).train()
    [line] = [line for line in capfd.readouterr().out.splitlines() if "learner" in line]
    assert ("ppo and sac" in line) == named


@pytest.mark.parametrize("name", ["calm_ppo", pytest.param("own_sac", marks=pytest.mark.slow)])
def test_algorithm_subclass_trains(name: str, folder: Path, equal: ModuleType) -> None:
    algorithm: Any = module("calm").CalmPPO if name == "calm_ppo" else equal.OwnSAC
    section = SHORT["ppo"] if name == "calm_ppo" else {**SHORT["sac"], "own": 100.0}
    settings: dict[str, Any] = {name: section, "num_envs": 8, "max_iterations": 2}
    row = make_trainer(prepare("Cartpole", algo=algorithm, log={"console": "quiet"}, **settings)).train()
    key, least = ("loss/calm", 0.0) if name == "calm_ppo" else ("loss/actor", 50.0)
    assert row[key] > least  # type: ignore[operator]


def extended(folder: str = "runs", **changes: Any) -> Trainer:
    """Make a trainer with the document's extension, which the task's yaml names."""
    Path("my_cfg/task").mkdir(exist_ok=True)
    entry = {"_target_": "smooth.Smoothness", "reward": 0.2, **changes.pop("entry", {})}
    section = {"ppo": {"extensions": {changes.pop("name", "smooth"): entry}}}
    lines = "# @package _global_\ndefaults: [Cartpole, _self_]\n" + yaml.safe_dump(section)
    Path("my_cfg/task/Smooth.yaml").write_text(lines)
    settings = {"num_envs": 8, "seed": 1, "ppo": SHORT["ppo"], "log": {"console": "quiet", "dir": folder}, **changes}
    return make_trainer(prepare("Smooth", config_dir="my_cfg", **settings))


def test_extension_adds_reward_and_loss_and_resumes(folder: Path) -> None:
    whole = extended("whole", max_iterations=4)
    algorithm: Any = whole.algorithm
    assert algorithm.losses[-1] == "loss/calm" and float(algorithm._coefficients[-1]) == pytest.approx(0.01)
    row = whole.train()
    assert row["loss/calm"] > 0.0 and row["smooth/change"] > 0.0  # type: ignore[operator]
    smooth, rollout = algorithm.extensions["smooth"], algorithm.rollout
    smooth.last.copy_(rollout.action[0])
    learned = smooth.begin_update(rollout, rollout.reward, {}, algorithm.policy)
    change = (rollout.action[1:] - rollout.action[:-1]).square().mean(dim=-1)
    torch.testing.assert_close(rollout.reward[1:] - learned[1:], 0.2 * change)
    assert torch.equal(rollout.reward[0], learned[0])

    extended("parts", max_iterations=2).train()
    run = the_run(folder / "parts")
    with pytest.raises(ConfigError, match=r"ppo\.extensions\.smooth\._target_=smooth\.Smoothness would run code"):
        prepare("Cartpole", checkpoint=str(run))
    extended("parts", max_iterations=4, checkpoint=str(run)).train()
    assert_same_run(folder / "whole", folder / "parts", "/config")
    assert final_state(folder / "parts")["algorithm"]["extensions"]["smooth"]["last"].any()
    spec = prepare("Smooth", checkpoint=str(run), test=True, config_dir="my_cfg", num_envs=8)
    assert evaluate_run(spec)["episodes"] == 8


def test_extension_reward_and_loss_change_the_policy(folder: Path) -> None:
    policies = []
    for entry in ({"reward": 0.0, "calm": 0.0}, {"reward": 0.5, "calm": 0.0}, {"reward": 0.0, "calm": 0.5}):
        it = extended(max_iterations=1, entry=entry)
        it.train()
        policies.append(it.algorithm.policy.state_dict())
    plain = make_trainer(
        prepare("Cartpole", num_envs=8, seed=1, max_iterations=1, ppo=SHORT["ppo"], log={"console": "quiet"})
    )
    plain.train()
    unchanged = [differences(plain.algorithm.policy.state_dict(), policy) == [] for policy in policies]
    assert unchanged == [True, False, False]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"entry": {"_target_": "my_search.RandomSearch"}}, r"ppo\.extensions\.smooth\._target_=my_search\.RandomSe"),
        ({"entry": {"_target_": None}}, r"ppo\.extensions\.smooth\._target_: "),
        ({"entry": {"rewards": 0.2}}, r"ppo\.extensions\.smooth: .*'rewards'"),
        ({"name": "rnd"}, r"ppo\.extensions\.rnd: "),
    ],
)
def test_invalid_extension_is_rejected(changes: Any, key: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}") as info:
        extended(**changes)
    assert "\n" not in str(info.value)
