"""Tests of the command `transfer`: a policy in other simulators and in changed physics."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from contextlib import closing
from pathlib import Path

import matplotlib.image
import pytest
import torch

from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError
from gpusim_rl.export import files
from gpusim_rl.sim import SimChoice
from gpusim_rl.sim.params import GROUND
from gpusim_rl.view import player
from helpers.training import make_trainer, the_run

pytest_plugins = ["helpers.tool_runs"]

SMALL = ["--num-envs", "3", "--seconds", "0.5"]


@pytest.fixture
def transfer(load_tool, runs_folder, tmp_path, monkeypatch):
    shutil.copytree(runs_folder / "runs", tmp_path / "runs", symlinks=True)
    monkeypatch.chdir(tmp_path)
    return load_tool("transfer")


def run_transfer(transfer, *arguments: str) -> dict[str, dict]:
    return {row["variant"]: row for row in transfer.transfer(transfer.parse([*arguments]))}


def open_variant(transfer, args: Namespace, name: str) -> closing[VecEnv]:
    with closing(transfer.open_player(args, "mujoco", 1, {})) as probe:
        plain, variants = transfer.plan(probe, args.seconds)
    [variant] = [variant for variant in variants if variant.name == name]
    env = transfer.open_player(args, variant.sim, args.num_envs, {**plain, **variant.changes}).env
    transfer.vary(env, variant)
    return closing(env)


def test_run_is_compared_across_changed_physics(transfer, capsys):
    rows = run_transfer(transfer, "Cartpole", *SMALL, "--only", "step,friction,gains,effort,delay")
    printed = capsys.readouterr().out.splitlines()
    run = Path("runs/Cartpole/latest")
    table = json.loads((run / "transfer.json").read_text())
    assert table["task"] == "Cartpole" and [row["variant"] for row in table["rows"]] == list(rows)
    assert matplotlib.image.imread(run / "transfer.png").shape[2] == 4
    shown = [line for line in printed if "  " in line][1:]
    names = sorted((name for name in rows if "error" not in rows[name]), key=lambda name: rows[name]["difference"])
    assert [line.partition("  ")[0] for line in shown] == names and "delay 3 (50 ms)" in names
    assert max(rows[name]["length_mean"] for name in names) == 30.0
    same = {name for name in names if rows[name]["difference"] == 0.0}
    assert same == {"plain", "friction x0.4", "friction x0.6", "friction x0.8", "friction x1.2"}  # no contacts
    assert any(line.startswith("gains x1.1: ") for line in printed)


def test_same_seed_gives_the_same_initial_states(transfer):
    first, second = (run_transfer(transfer, "Cartpole", *SMALL, "--only", "trained")["plain"] for _ in range(2))
    other = run_transfer(transfer, "Cartpole", *SMALL, "--only", "trained", "--seed", "1")["plain"]
    assert first == second and first["return_mean"] != other["return_mean"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Cartpole", "--only", "frictoin"], "--only frictoin: "),
        (["Nothing"], "no checkpoint 'Nothing'"),
        (["Cartpole", "--seconds", "0"], "--seconds: expected at least 0.001, got 0"),
    ],
)
def test_invalid_transfer_options_are_rejected(transfer, capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        transfer.main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith(f"error: {words}") and error.count("\n") == 1


def test_unsupported_simulator_becomes_an_error_row(transfer, monkeypatch):
    def refuse(name: str, device: torch.device) -> SimChoice:
        if name != "mujoco":
            raise ConfigError(f"{name} has no such joints")
        return choose(name, device)

    choose = player.choose_sim
    monkeypatch.setattr(player, "choose_sim", refuse)
    rows = run_transfer(transfer, "Cartpole", *SMALL, "--only", "simulator,step")
    assert rows["newton"]["error"] == "newton has no such joints" and "return_mean" in rows["half time step"]


def test_variants_reach_the_physics(transfer):
    args = transfer.parse(["Ant", *SMALL])
    for name, actor, field, factor in (
        ("friction x0.4", "ant", "geom_friction", 0.4),
        ("friction x0.4", GROUND, "geom_friction", 0.4),
        ("mass x1.1", "ant", "body_mass", 1.1),
        ("mass x1.1", "ant", "body_inertia", 1.1),
        ("effort x0.9", "ant", "actuator_gainprm", 0.9),
    ):
        with open_variant(transfer, args, name) as env:
            param = env.sim.param(field, actor)
            changed = param.value[..., 0] if param.value.ndim > 2 else param.value
            default = param.default[..., 0] if param.default.ndim > 1 else param.default
            torch.testing.assert_close(changed, (factor * default).expand_as(changed))
    with open_variant(transfer, args, "half time step") as env:
        assert (env.sim.dt, env.task.dt) == pytest.approx((1 / 240, 1 / 60))
    with open_variant(transfer, args, "rk4") as env:
        assert env.sim.scene.evaluations == 4
    with open_variant(transfer, args, "delay 2 (33 ms)") as env:
        assert env.randomizer is not None and env.randomizer.latency is not None
        assert env.randomizer.latency.delay.tolist() == [2, 2, 2]
    with open_variant(transfer, args, "noise 10%") as env:
        obs = env.reset()["policy"]
        clean = env.clean_obs()["policy"]
        assert 0.05 < float((obs / clean - 1.0)[clean.abs() > 1e-3].std()) < 0.15
    with closing(transfer.open_player(args, "mujoco", 1, {})) as probe:
        reasons = {variant.group: variant.reason for variant in transfer.plan(probe, None)[1]}
    assert "gains" in reasons["gains"] and "noise" in reasons["trained"]


@pytest.mark.slow
def test_exported_variant_follows_names_on_the_card(transfer, monkeypatch):
    arguments = ("Ant", *SMALL, "--only", "exported")
    rows = run_transfer(transfer, *arguments)
    assert abs(rows["exported"]["difference"]) < 1e-4 * abs(rows["plain"]["return_mean"])

    def shuffled(*arguments, **options):
        folder, card = write_all(*arguments, **options)
        card["actuators"].reverse()
        return folder, card

    write_all = files.write_all
    monkeypatch.setattr(files, "write_all", shuffled)
    wrong = run_transfer(transfer, *arguments)
    assert abs(wrong["exported"]["difference"]) > 1e-3 * abs(rows["plain"]["return_mean"])


@pytest.mark.slow
def test_simulators_agree_on_a_walking_robot(load_tool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_trainer("Go1Velocity", tmp_path, max_iterations=1).train()
    rows = run_transfer(
        load_tool("transfer"), str(the_run(tmp_path)), *SMALL, "--only", "simulator,gains,trained,exported"
    )
    plain = rows.pop("plain")
    assert "gains x0.9" in rows and rows["as trained"]["return_mean"] != plain["return_mean"]
    for name in ("mjwarp", "newton", "exported"):
        assert rows[name]["task/lin_vel_error"] == pytest.approx(plain["task/lin_vel_error"], rel=0.1), name
