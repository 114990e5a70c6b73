"""Values of a compiled MuJoCo model by name, to compare a robot in two scenes. Needs only numpy and mujoco."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np

OPTIONS = ("timestep", "integrator", "cone", "impratio", "solver", "iterations", "ls_iterations", "tolerance")
OPTIONS += ("ls_tolerance", "ccd_iterations", "ccd_tolerance", "noslip_iterations", "gravity", "disableflags")
OPTIONS += ("enableflags", "density", "viscosity", "wind")
CONTACT = ("contype", "conaffinity", "condim", "priority", "friction", "solref", "solimp", "solmix", "margin", "gap")
JOINT = ("type", "range", "limited", "stiffness", "solref", "solimp", "margin", "actfrclimited", "actfrcrange")
DOF = ("armature", "damping", "frictionloss", "solref", "solimp")
ACTUATOR = ("ctrllimited", "forcelimited", "ctrlrange", "forcerange", "gear", "dyntype", "gaintype", "biastype")

Numbers = dict[str, dict[str, list[float]]]


def plain(value: Any) -> list[float]:
    """Return a number or an array as a flat list, rounded to seven significant digits."""
    return [float(f"{x:.7g}") for x in np.asarray(value, dtype=float).ravel()]


def describe(model: mujoco.MjModel, root: str, pose: dict[str, float], ground: str) -> Numbers:
    """Return the model values of one robot, the ground and the options.

    Geoms, centres of mass and the mass matrix are evaluated in a pose with the root at the origin, regardless of how
    the robot is divided into bodies. Geoms that cannot collide are left out.

    Args:
        model: The model.
        root: The robot's root body.
        pose: Joint angles [rad]; 0 for other joints.
        ground: Geom of the ground.
    """
    prefix = root.rpartition("/")[0] + "/"
    data = mujoco.MjData(model)
    of_robot = model.body_rootid == model.body(root).id
    joints = [i for i in range(model.njnt) if of_robot[model.jnt_bodyid[i]]]
    names = {i: model.joint(i).name.removeprefix(prefix) for i in joints}
    for i in joints:
        if model.jnt_type[i] == mujoco.mjtJoint.mjJNT_FREE:
            data.qpos[model.jnt_qposadr[i] :][:7] = [0, 0, 0, 1, 0, 0, 0]
            names[i] = "root"
        else:
            data.qpos[model.jnt_qposadr[i]] = pose.get(names[i], 0.0)
    mujoco.mj_forward(model, data)

    def values(kind: str, fields: tuple[str, ...], i: int) -> dict[str, list[float]]:
        return {field: plain(getattr(model, f"{kind}_{field}")[i]) for field in fields}

    found: Numbers = {"options": {field: plain(getattr(model.opt, field)) for field in OPTIONS}}
    found["ground"] = values("geom", CONTACT, model.geom(ground).id)
    for i in joints:
        row = values("jnt", JOINT, i) | values("dof", DOF, model.jnt_dofadr[i])
        if names[i] != "root":
            row["axis"], row["anchor"] = plain(data.xaxis[i].round(6)), plain(data.xanchor[i].round(6))
        found[f"joint {names[i]}"] = row
    order = [d for i in sorted(joints, key=lambda i: names[i]) for d in dofs(model, i)]
    full = np.zeros((model.nv, model.nv))
    mujoco.mj_fullM(model, full, data.qM) if hasattr(data, "qM") else mujoco.mj_fullM(model, data, full)
    found["whole"] = {
        "mass": plain(model.body_mass[of_robot].sum()),
        "mass matrix": plain(full[np.ix_(order, order)]),
        "gravity on dofs": plain(data.qfrc_bias[order]),
    }
    for i in range(model.ngeom):
        if of_robot[model.geom_bodyid[i]] and (model.geom_contype[i] or model.geom_conaffinity[i]):
            row = values("geom", ("type", "size", *CONTACT), i)
            row["inverse weight of its body"] = plain(model.body_invweight0[model.geom_bodyid[i]])
            row["pos"], row["axes"] = plain(data.geom_xpos[i].round(6)), plain(data.geom_xmat[i].round(6))
            found[f"shape {model.geom(i).name.removeprefix(prefix)}"] = row
    for i in range(model.nu):
        row = values("actuator", ACTUATOR, i)
        for kind in ("ctrl", "force"):
            if not row[f"{kind}limited"][0]:
                del row[f"{kind}range"]
        row["gain"] = plain(model.actuator_gainprm[i, :1])
        row["bias"] = plain(model.actuator_biasprm[i, :3])
        found[f"actuator {joint_of(model, i, prefix)}"] = row
    for i in range(model.nsite):
        if of_robot[model.site_bodyid[i]]:
            row = {"pos": plain(data.site_xpos[i].round(6)), "axes": plain(data.site_xmat[i].round(6))}
            found[f"site {model.site(i).name.removeprefix(prefix)}"] = row
    return found


def joint_of(model: mujoco.MjModel, actuator: int, prefix: str) -> str:
    """Return the joint that an actuator drives."""
    return model.joint(model.actuator_trnid[actuator, 0]).name.removeprefix(prefix)


def dofs(model: mujoco.MjModel, joint: int) -> range:
    """Return the indices of a joint's degrees of freedom."""
    first = model.jnt_dofadr[joint]
    return range(first, first + (6 if model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_FREE else 1))


def differences(ours: Numbers, theirs: Numbers) -> list[tuple[str, str, Any, Any]]:
    """Return (what, field, ours, theirs) where they differ by more than 1e-5 (relative); ours may have extra sites."""
    rows: list[tuple[str, str, Any, Any]] = []
    for what in theirs.keys() | {what for what in ours if not what.startswith("site ")}:
        if what not in ours or what not in theirs:
            rows.append((what, "", what in ours, what in theirs))
            continue
        for field in ours[what].keys() | theirs[what].keys():
            a, b = ours[what].get(field), theirs[what].get(field)
            if a is None or b is None or len(a) != len(b) or not np.allclose(a, b, rtol=1e-5, atol=1e-6):
                rows.append((what, field, a, b))
    return sorted(rows)
