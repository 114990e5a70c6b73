"""`new_task.py --from-isaaclab` and `--from-mjlab` in environments with the libraries; what they write runs here."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from gpusim_rl import make_env
from gpusim_rl.env import VecEnv
from gpusim_rl.files.paths import assets_dir
from helpers.beside import Library, environment_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
CART = ("--mjcf", "cartpole.xml", "--names", "slider_to_cart=slider,cart_to_pole=hinge")

FRANKA = ("--mjcf", "franka.xml", "--names", "panda_joint=joint,panda_hand=hand")


@pytest.fixture(scope="module")
def pythons(tmp_path_factory) -> dict[str, Path]:
    return {name: environment_of(name, tmp_path_factory.mktemp(name) / "venv") for name in ("isaaclab", "mjlab")}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    for file in ("cartpole", "anymal", "franka", "go2/go2"):
        shutil.copy(assets_dir() / f"{file}.xml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_tasks.taken", raising=False)
    return tmp_path


def taken(pythons, folder: Path, library: str, cfg: str, *words: str) -> tuple[VecEnv, str]:
    option = f"--from-{library}"
    done = Library(pythons[library], folder).run("tools/new_task.py", "Taken", option, cfg, *words)
    env = make_env("Taken", num_envs=4, device="cpu", config_dir=folder / "my_cfg")
    env.reset()
    for _ in range(5):
        step = env.step(torch.zeros(4, env.task.num_actions))
        assert step.reward.isfinite().all() and not step.diverged.any()
    env.close()
    return env, done.stdout


def test_isaac_labs_cartpole_has_its_numbers_here(pythons, folder):
    env, said = taken(pythons, folder, "isaaclab", "Isaac-Cartpole", *CART)
    cfg = env.task.cfg
    assert '  robot: "https://' in said and "scene.distant_light: " in said
    assert (cfg.physics_hz, cfg.control_hz, cfg.episode_length, cfg.action_scale) == (120, 60, 300, 100.0)
    weights = {"alive": 1.0, "terminating": -2.0, "pole_pos": -1.0, "cart_vel": -0.01, "pole_vel": -0.005}
    assert cfg.weights == weights | {"success_rate": 0.0}  # type: ignore[attr-defined]
    assert cfg.terms["terminations"]["cart_out_of_bounds"]["bounds"] == [-3.0, 3.0]  # type: ignore[attr-defined]
    assert set(cfg.terms["rewards"]) == {"pole_pos", "cart_vel", "pole_vel"}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("cfg", "words", "said"),
    [
        (
            "Isaac-Cartpole-Direct",
            CART,
            "see _apply_action, _get_observations, _get_rewards, _get_dones, _reset_idx of",
        ),
        ("Isaac-Velocity-Flat-AnymalD", ("--mjcf", "anymal.xml"), "commands.base_velocity: "),
        ("Isaac-Velocity-Flat-UnitreeGo2", ("--mjcf", "go2.xml"), "rewards.feet_air_time: "),
        ("Isaac-Reach-Franka", FRANKA, "scene.table: "),
    ],
)
def test_tasks_of_isaac_lab_run_before_anything_is_written(pythons, folder, cfg, words, said):
    assert said in taken(pythons, folder, "isaaclab", cfg, *words)[1]


@pytest.mark.parametrize("robot", ["Go1", "G1"])
@pytest.mark.parametrize("ground", ["Flat", "Rough"])
def test_mjlabs_velocity_tasks_are_ours_with_their_numbers(pythons, folder, robot, ground):
    env, said = taken(pythons, folder, "mjlab", f"Mjlab-Velocity-{ground}-Unitree-{robot}")
    ours = make_env(f"{robot}Velocity", num_envs=4, device="cpu", task={"terrain": ground.lower()})
    assert "all terms are written" in said
    for name in ("root", "torso", "imu", "feet", "soles", "height", "foot_ring"):
        assert getattr(env.task.robot, name) == getattr(ours.task.robot, name), name  # type: ignore[attr-defined]
    for name in ("pose", "scale", "tightness"):
        assert torch.allclose(getattr(env.task, name), getattr(ours.task, name), rtol=1e-6), name
    assert env.obs_sizes == {group: part.shape[1] for group, part in ours.reset().items()}
    ours.close()


@pytest.mark.parametrize(
    ("cfg", "to_write"),
    [
        ("Mjlab-Lift-Cube-Yam", "rewards.lift: "),
        ("Mjlab-Tracking-Flat-Unitree-G1", "commands.motion: "),
        ("Mjlab-Cartpole-Balance", "rewards.smooth_reward: "),
    ],
)
def test_tasks_of_mjlab_run_before_anything_is_written(pythons, folder, cfg, to_write):
    assert to_write in taken(pythons, folder, "mjlab", cfg)[1]


@pytest.mark.parametrize(
    ("library", "cfg", "said"),
    [
        ("isaaclab", "Isaac-Cartpol", "Isaac Lab has no such env. Did you mean 'Isaac-Cartpole'?"),
        ("isaaclab", "Isaac-Cartpole", "which MuJoCo does not read; try --mjcf or --urdf"),
        ("isaaclab", "Isaac-Shadow-Handover-Direct", "is no configuration of an env"),
        ("isaaclab", "isaaclab.sim.SimulationCfg", "makes a SimulationCfg, expected a ManagerBasedRLEnvCfg"),
        ("isaaclab", "no_such_module:Mine", "No module named 'no_such_module'"),
        ("mjlab", "Mjlab-Velocity-Flat-Unitree-Go", "mjlab has no such env. Did you mean"),
        ("mjlab", "mjlab.sim.SimulationCfg", "is no configuration of an env"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(pythons, folder, library, cfg, said):
    done = Library(pythons[library], folder).run("tools/new_task.py", "Taken", f"--from-{library}", cfg, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 == done.stderr.count(said), done.stderr
    assert not (folder / "my_tasks").exists()


@pytest.mark.parametrize(("library", "turn"), [("isaaclab", [0, 0, 1, 0]), ("mjlab", [0, 0, 0, 1])])
def test_the_order_of_quaternions_is_as_the_pages_say(pythons, folder, library, turn):
    """Half a turn about z."""
    math = {"isaaclab": "isaaclab.utils.math", "mjlab": "mjlab.utils.lab_api.math"}[library]
    code = f"import torch, {math} as m; z = torch.zeros(1); print(m.quat_from_euler_xyz(z, z, z + 3.14).round().int())"
    (folder / "order.py").write_text(code)
    assert (
        Library(pythons[library], folder)
        .run(str(folder / "order.py"))
        .stdout.splitlines()[-1]
        .startswith(f"tensor([{turn}]")
    )
