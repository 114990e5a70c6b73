"""From a log to drives, and from drives to a model and its randomisation."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from deployed.identification import draw_drives, judge, play
from gpusim_rl.api import load_spec, make_env
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.export.policy import DeployedPolicy
from gpusim_rl.files.safe_open import dump_yaml, load_yaml
from gpusim_rl.identify.fit import identify
from gpusim_rl.identify.log import read_log
from gpusim_rl.identify.page import page
from gpusim_rl.identify.plan import SHARE, make_plan
from gpusim_rl.settings.compose import compose
from gpusim_rl.sim import Scene
from gpusim_rl.sim.drives import KINDS, nominal, read_drives, servo_gains, with_drives
from helpers.commands import ROOT, load_file
from helpers.exports import term, write_hopper
from helpers.raised import raises

ARM = """<mujoco><option integrator="implicitfast"/><worldbody><body name="upper" pos="0 0 1">
<joint name="shoulder" axis="0 1 0" range="-100 100" armature="0.02"/>
<geom type="capsule" size=".04" fromto="0 0 0 .3 0 0" mass="2"/>
<body pos=".3 0 0"><joint name="elbow" axis="0 1 0" range="-120 120" armature="0.01"/>
<geom type="capsule" size=".03" fromto="0 0 0 .25 0 0" mass="1"/></body></body></worldbody><actuator>
<position name="shoulder" joint="shoulder" kp="60" kv="4" forcerange="-40 40"/>
<position name="elbow" joint="elbow" kp="30" kv="2" forcerange="-20 20"/></actuator></mujoco>"""


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    file = tmp_path_factory.mktemp("arm") / "arm.xml"
    file.write_text(ARM)
    return file


def scene_with(file, hz=200.0):
    scene = Scene(hz)
    scene.add("robot", file)
    return scene


@pytest.fixture(scope="module")
def targets(arm):
    return make_plan(scene_with(arm), {"shoulder": 0.5, "elbow": 0.5}, 6.0, 200.0).arrays()


@pytest.fixture(scope="module")
def hidden(arm, targets):
    """Drives of a hidden arm, its delay and its log."""
    scene = scene_with(arm)
    drives, delay = draw_drives(scene, 3)
    return drives, delay, play(scene, targets, drives, delay, 3)


@pytest.fixture(scope="module")
def result(arm, hidden):
    return identify(scene_with(arm), hidden[2])


def test_values_of_a_hidden_arm_are_within_their_intervals(result, hidden):
    row = judge(result, *hidden[:2])
    assert row["inside"] >= 9 and row["values"] == 11
    assert max(row["errors"][kind] for kind in ("armature", "damping", "friction", "stiffness")) < 6.0  # %
    assert row["held_out_over_noise"] < 1.2
    assert (row["unseen"], row["misfit"]) == ([], {})


def test_unused_end_of_a_long_log_is_reported(arm, hidden, monkeypatch):
    monkeypatch.setattr("gpusim_rl.identify.fit.MOST_S", 3.0)
    cropped = identify(scene_with(arm), hidden[2])
    assert cropped.log.time[-1] - cropped.log.time[0] <= 3.0
    assert [line for line in cropped.warnings() if "first 3 s" in line]


def test_gains_of_the_log_are_exact(arm, hidden):
    drives, _, log = hidden
    own = [np.array([drives[joint][kind] for joint in log.joints]) for kind in ("stiffness", "damping")]
    known = type(log)(log.path, log.joints, log.time, log.target, log.q, log.dq, kp=own[0], kd=0.5 * own[1])
    rows = identify(scene_with(arm), known).drives()["joints"]
    for joint, row in rows.items():
        assert row["stiffness"] == {"value": drives[joint]["stiffness"], "low": drives[joint]["stiffness"]} | {
            "high": drives[joint]["stiffness"],
            "is": "given",
        }
        assert row["servo_damping"] == pytest.approx(0.5 * drives[joint]["damping"])
        assert row["damping"]["value"] == pytest.approx(drives[joint]["damping"], rel=0.03)


def test_joint_that_does_not_move_is_named(arm, targets):
    scene, still = scene_with(arm), {**targets, "target": targets["target"].copy()}
    still["target"][:, 0] = still["target"][0, 0]
    drives, delay = draw_drives(scene, 5)
    drives["shoulder"]["friction"] = 40.0  # it does not give way either
    found = identify(scene, play(scene, still, drives, delay, 5))
    assert "shoulder armature" in [name for names in found.unseen for name in names]
    row = found.drives()["joints"]["shoulder"]["armature"]
    assert row["is"] == "not seen" and row["value"] == pytest.approx(0.02, rel=0.2)
    assert row["high"] / row["low"] > 2.0


def test_backlash_is_noticed(arm, targets):
    scene = scene_with(arm)
    drives, delay = draw_drives(scene, 4)
    assert "elbow" in identify(scene, play(scene, targets, drives, delay, 4, "elbow")).misfit


def test_plan_keeps_efforts_and_limits(arm):
    plan = make_plan(scene_with(arm), {"shoulder": 1.7, "elbow": 0.0}, 4.0, 200.0)
    assert (plan.effort <= SHARE).all() and (plan.margin >= 0.05).all()
    assert plan.amplitude.min() > 0.05
    assert (plan.target[[0, -1]] == plan.stance).all()
    with pytest.raises(TaskError):
        make_plan(scene_with(write_unactuated(arm)), {}, 4.0, 200.0)


def write_unactuated(arm):
    file = arm.with_name("free.xml")
    file.write_text(ARM[: ARM.index("<actuator>")] + "</mujoco>")
    return file


def test_page_shows_errors_and_escapes_names(result):
    html = page(result, "<b>arm")
    assert "&lt;b&gt;arm" in html and "<b>arm" not in html and html.count("shoulder") > 5


def test_command_writes_plan_drives_and_page(arm, hidden, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main, log = load_file(ROOT / "tools" / "identify.py", "identify_tool").main, hidden[2]
    assert main([str(arm), "--plan", "plan.npz", "--seconds", "4"]) == 0
    assert {*np.load("plan.npz")} == {"time", "target", "joint_names", "kp", "kd"}
    np.savez("log.npz", time=log.time, target=log.target, q=log.q, dq=log.dq, joint_names=log.joints)
    assert main([str(arm), "log.npz", "--fit", "friction,delay"]) == 0
    assert "held out" in capsys.readouterr().out
    rows = load_yaml(tmp_path / "log.drives")["joints"]
    assert {row["is"] for joint in rows.values() for kind, row in joint.items() if kind == "friction"} == {"identified"}
    assert (tmp_path / "log.html").is_file()


# To training


@pytest.fixture(scope="module")
def go1(tmp_path_factory):
    """Drives file of Go1 with invented values, as `identify` writes it."""
    spec: Any = load_spec(compose(["task=Go1Velocity"]), [])
    scene = spec.task_class.scene(spec.cfg.task)
    own, (values, _) = nominal(scene), draw_drives(scene, 1)
    row = lambda value: {"value": value, "low": value - 0.1 * abs(value), "high": value + 0.1 * abs(value)}  # noqa: E731
    file = tmp_path_factory.mktemp("go1") / "go1.drives"
    content = {
        **{"format": 1, "robot": "robot", "delay": {"value": 0.009, "low": 0.0089, "high": 0.0091}},
        "nominal": {joint: {k: v for k, v in row.items() if k != "friction"} for joint, row in own.items()},
        "joints": {
            joint: {**{kind: row(values[joint][kind]) for kind in KINDS}, "servo_damping": 0.5} for joint in own
        },
    }
    file.write_bytes(dump_yaml(content))
    return file, values


def test_training_uses_model_ranges_and_bias(go1):
    file, values = go1
    env = make_env("Go1Velocity", task={"drives": str(file)}, num_envs=4, sim="mujoco", device="cpu")
    model = env.sim.scene.model
    for joint, own in values.items():
        dof, i = model.joint(f"robot/{joint}").dofadr[0], model.actuator(f"robot/{joint}").id
        assert model.dof_armature[dof] == pytest.approx(own["armature"])
        assert model.dof_frictionloss[dof] == pytest.approx(own["friction"])
        assert servo_gains(model, i) == pytest.approx((own["stiffness"], 0.5))
        assert model.dof_damping[dof] == pytest.approx(own["damping"] - 0.5)
    kp = env.sim.param("actuator_gainprm", "robot", None).value[..., 0]
    assert (kp.std(dim=0) > 0.0).all()
    assert (abs(kp / kp.new_tensor(model.actuator_gainprm[:, 0]) - 1.0) < 0.1001).all()
    late = env.sim.param("actuator_delay", "robot", None).value
    assert {round(value, 4) for value in late.flatten().tolist()} <= {0.0025, 0.0075}  # one or two steps of 5 ms
    cfg: Any = env.cfg
    assert cfg.encoder_bias == pytest.approx(0.005 + 0.1 * max(abs(own["bias"]) for own in values.values()))
    env.close()


def test_settings_hold_the_drives_themselves(go1):
    spec = load_spec(compose(["task=Go1Velocity", f"task.drives={go1[0]}"]), [])
    assert spec.config["task"]["drives"]["joints"]["FR_hip_joint"]["servo_damping"] == 0.5
    assert spec.config["task"]["randomize"] and json.dumps(spec.config["task"]["drives"])
    before = spec.config["task"]["randomization_params"]
    assert load_spec({**spec.config}, []).config["task"]["randomization_params"] == before
    assert "rigid_shape_properties" in before["actor_params"]["robot"]  # the task's own


def test_drives_of_another_robot_are_refused(go1):
    spec: Any = load_spec(compose(["task=Go2Velocity", f"task.drives={go1[0]}"]), [])
    with raises(ConfigError, key="task.drives of robot") as info:
        spec.task_class.built_scene(spec.cfg.task)
    assert "another robot" in info.value.problem


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"format": 2}, ""),
        ({"joints": 3}, ""),
        ({"delay": {"value": "x", "low": 0, "high": 0}}, ""),
        ({"delay": {"value": 0.1, "low": 0.2, "high": 0.3}}, ": delay"),
        ({"nominal": {}}, ""),
    ],
)
def test_damaged_drives_are_refused(go1, tmp_path, change, key):
    file = tmp_path / "bad.drives"
    file.write_bytes(dump_yaml({**load_yaml(go1[0]), **change}))
    with raises(ConfigError, key=f"{file}{key}"):
        read_drives(file)


def test_drives_apply_to_a_scene(arm, result):
    scene = with_drives(scene_with(arm), result.drives())
    values = result.drives()["joints"]["elbow"]
    assert scene.model.joint("robot/elbow").armature[0] == pytest.approx(values["armature"]["value"])
    steps = np.ceil(scene.model.actuator_delay * 200.0)
    assert steps == pytest.approx(round(result.drives()["delay"]["value"] * 200.0))


@pytest.mark.slow
def test_go1_is_identified(tmp_path):
    from deployed.identification import HZ, SECONDS, stance_of

    spec: Any = load_spec(compose(["task=Go1Velocity"]), [])
    scene = spec.task_class.scene(spec.cfg.task)
    targets = make_plan(scene, stance_of(scene), SECONDS, HZ).arrays()
    drives, delay = draw_drives(scene, 8)
    row = judge(identify(scene, play(scene, targets, drives, delay, 8)), drives, delay)
    assert row["values"] == 61 and row["inside"] >= 52
    assert max(row["errors"][kind] for kind in ("armature", "damping", "friction", "stiffness")) < 3.0
    assert row["held_out_over_noise"] < 2.0 and row["cpu_s"] < 60.0 and row["misfit"] == {}


def test_log_of_csv_equals_npz(hidden, tmp_path):
    log = hidden[2]
    columns = ["time", *(f"{kind}/{joint}" for kind in ("target", "q", "dq") for joint in log.joints)]
    table = np.concatenate([log.time[:, None], log.target, log.q, log.dq], axis=1)
    np.savetxt(tmp_path / "log.csv", table, delimiter=",", header=",".join(columns), comments="")
    read = read_log(tmp_path / "log.csv")
    assert read.joints == log.joints and read.dq is not None and log.dq is not None
    assert np.allclose(read.q, log.q) and np.allclose(read.dq, log.dq)


def test_runtime_corrects_the_encoders_bias(tmp_path):
    exact, biased = (
        write_hopper(tmp_path / name, [term("pos", 1, "joint positions"), term("one", 1, "position of knee")])
        for name in ("exact", "biased")
    )
    card = json.loads((biased / "policy.json").read_text())
    card["joints"][0]["encoder_bias"] = 0.1
    (biased / "policy.json").write_text(json.dumps(card))
    action, targets = DeployedPolicy(exact).act({"pos": [0.2], "one": [-0.3]})
    same, late = DeployedPolicy(biased).act({"pos": [0.3], "one": [-0.2]})
    assert same == pytest.approx(action, abs=1e-5)
    assert late == pytest.approx({name: value + 0.1 for name, value in targets.items()}, abs=1e-5)
    deploy = load_file(ROOT / "docs" / "examples" / "deploy.py", "deploy_example")
    robot = deploy.Robot(biased, card)  # whose encoders are those of the card
    true = robot.data.qpos[card["joints"][0]["qpos"]]
    assert robot.read("joint positions") == pytest.approx([true + 0.1])
    assert robot.read("position of knee") == pytest.approx(true + 0.1)
    robot.step(late)
    assert robot.data.ctrl == pytest.approx([*targets.values()], abs=1e-5)
