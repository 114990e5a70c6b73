"""Identify hidden robots from simulated logs, and see whether wrong models are noticed; write identification.json.

    python benchmarks/deployed/identification.py

`robots`: five of Go1, with other drives, encoders and delay: errors in %, mrad or ms (medians over joints), values
within the 95 % intervals, error on the held-out end of the log over noise. `wrong`: robots of which all joints have
Stribeck friction, or one has backlash; `noticed`: joints whose model is said to be wrong. `idle`: a joint that never
moves, and the parameters that the log is said not to show.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from gpusim_rl.identify.fit import Identified, identify
from gpusim_rl.identify.log import Log
from gpusim_rl.identify.plan import make_plan
from gpusim_rl.sim import Scene
from gpusim_rl.sim.drives import KINDS, nominal, servos
from gpusim_rl.view.playback import scene_by_name
from measuring.checkout import provenance, write

SEEDS, SECONDS, HZ = range(5), 8.0, 200.0
NOISE = 0.002, 0.1  # of readings [rad] and velocities [rad/s]
STANCE = {"hip": 0.1, "thigh": 0.9, "calf": -1.8}
PLAY, STRIBECK, SLOW = 0.03, 1.5, 0.3  # backlash [rad]; friction at rest over Coulomb friction; decay speed [rad/s]


def draw_drives(scene: Scene, seed: int) -> tuple[dict[str, dict[str, float]], float]:
    """Return hidden values by joint, and a delay [s]."""
    rng, drives = np.random.default_rng(seed), {}
    for joint, own in nominal(scene).items():
        drives[joint] = {
            "armature": own["armature"] * rng.uniform(0.6, 1.6),
            "damping": own["damping"] * rng.uniform(0.7, 1.6),
            "friction": 0.2 * rng.uniform(0.5, 3.0),
            "stiffness": own["stiffness"] * rng.uniform(0.8, 1.2),
            "bias": rng.uniform(-0.03, 0.03),
        }
    return drives, rng.uniform(0.002, 0.014)


def play(
    scene: Scene,
    targets: dict[str, Any],
    drives: dict[str, dict[str, float]],
    delay: float,
    seed: int,
    wrong: str = "",
    noise: tuple[float, float] = NOISE,
) -> Log:
    """Play targets on a hidden robot with a fixed base; return its log.

    `wrong` is "", `stribeck`, or a joint with backlash.
    """
    (robot, found), spec = servos(scene), scene.spec.copy()
    for element in [*spec.keys, *spec.sensors, *(j for j in spec.joints if j.type == mujoco.mjtJoint.mjJNT_FREE)]:
        spec.delete(element)
    spec.option.disableflags |= mujoco.mjtDisableBit.mjDSBL_CONTACT
    names = [f"{scene.prefix(robot)}{joint}" for joint in found]
    if wrong in drives:
        joint = spec.joint(f"{scene.prefix(robot)}{wrong}")
        ends = {"range": [-0.5 * PLAY, 0.5 * PLAY], "limited": True, "armature": 1e-5}
        joint.parent.add_joint(name="play", type=joint.type, axis=joint.axis, pos=joint.pos, **ends)
    model = spec.compile()
    data, ids = mujoco.MjData(model), [model.joint(name).id for name in names]
    qpos, qvel, controls = model.jnt_qposadr[ids], model.jnt_dofadr[ids], [model.actuator(name).id for name in names]
    hidden = {kind: np.array([drives[joint][kind] for joint in found]) for kind in KINDS}
    model.dof_armature[qvel], model.dof_frictionloss[qvel] = hidden["armature"], hidden["friction"]
    model.actuator_gainprm[controls, 0] = hidden["stiffness"]
    model.actuator_biasprm[controls, 1], model.actuator_biasprm[controls, 2] = -hidden["stiffness"], -hidden["damping"]
    time, target = targets["time"], targets["target"]
    data.qpos[qpos] = target[0] - hidden["bias"]
    sent = np.stack([np.interp(time - delay, time, column) for column in target.T], axis=1)
    steps, rows = round((time[1] - time[0]) / model.opt.timestep), list[np.ndarray]()
    for row in sent:
        rows.append(np.concatenate([data.qpos[qpos] + hidden["bias"], data.qvel[qvel]]))
        data.ctrl[controls] = row - hidden["bias"]
        for _ in range(steps):
            if wrong == "stribeck":
                more = (STRIBECK - 1.0) * np.exp(-((data.qvel[qvel] / SLOW) ** 2))
                model.dof_frictionloss[qvel] = hidden["friction"] * (1.0 + more)
            mujoco.mj_step(model, data)
    q, dq = np.split(np.array(rows), 2, axis=1)
    rng = np.random.default_rng(1000 + seed)
    return Log(
        "hidden",
        [*found],
        time,
        target,
        q + rng.normal(0.0, noise[0], q.shape),
        dq + rng.normal(0.0, noise[1], q.shape),
    )


def stance_of(scene: Scene) -> dict[str, float]:
    """Return Go1's pose."""
    joints = [(joint, *joint.split("_")[:2]) for joint in servos(scene)[1]]
    return {joint: STANCE[part] * (-1.0 if part == "hip" and leg[1] == "L" else 1.0) for joint, leg, part in joints}


def judge(result: Identified, drives: dict[str, dict[str, float]], delay: float) -> dict[str, Any]:
    """Compare a result with the hidden values."""
    found, errors, inside, total = result.drives(), dict[str, float](), 0, 0
    for kind in KINDS:
        pairs = [(found["joints"][joint][kind], row[kind]) for joint, row in drives.items()]
        scale = [1e3 if kind == "bias" else 100.0 / true for _, true in pairs]
        errors[kind] = float(
            np.median([k * abs(row["value"] - true) for k, (row, true) in zip(scale, pairs, strict=True)])
        )
        inside, total = inside + sum(row["low"] <= true <= row["high"] for row, true in pairs), total + len(pairs)
    inside += found["delay"]["low"] <= delay <= found["delay"]["high"]
    errors["delay"] = 1e3 * abs(found["delay"]["value"] - delay)
    return {
        "errors": {kind: round(value, 3) for kind, value in errors.items()},
        "inside": int(inside),
        "values": total + 1,
        "held_out_over_noise": round(float(result.held_out.max()), 3),
        "unseen": result.unseen,
        "misfit": result.misfit,
        "cpu_s": round(result.seconds, 1),
        "rollouts": result.rollouts,
    }


def main() -> None:
    """Identify all robots; write the results."""
    out, scene = Path(__file__).with_suffix(".json"), scene_by_name("Go1Velocity")
    stance = stance_of(scene)
    targets = make_plan(scene, stance, SECONDS, HZ).arrays()
    report: dict[str, Any] = {**provenance(out), "robots": [], "wrong": []}
    report["environment"]["command"] = "python benchmarks/deployed/identification.py"
    for seed in SEEDS:
        drives, delay = draw_drives(scene, seed)
        report["robots"].append(judge(identify(scene, play(scene, targets, drives, delay, seed)), drives, delay))
    joints = [*stance]
    for seed in SEEDS:
        drives, delay = draw_drives(scene, 10 + seed)
        for wrong in ("stribeck", joints[2 * seed + 1]):
            result = identify(scene, play(scene, targets, drives, delay, seed, wrong))
            row = {
                "wrong": wrong,
                "noticed": result.misfit,
                "held_out_over_noise": round(float(result.held_out.max()), 3),
            }
            report["wrong"].append(row)
    idle = {**targets, "target": targets["target"].copy()}
    idle["target"][:, 5] = targets["target"][0, 5]
    drives, delay = draw_drives(scene, 20)
    report["idle"] = {"joint": joints[5], "unseen": identify(scene, play(scene, idle, drives, delay, 20)).unseen}
    inside, values = (sum(row[key] for row in report["robots"]) for key in ("inside", "values"))
    report["inside"] = f"{inside} of {values}"
    write(out, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
