"""Buffer sizes of MuJoCo Warp: constraint rows and contacts per world."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import mujoco
import numpy as np

from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.sim.scene import Scene

# Contacts between a plane and a geom, by geom type; other types have up to four.
_PLANE_CONTACTS = {
    mujoco.mjtGeom.mjGEOM_SPHERE.value: 1,
    mujoco.mjtGeom.mjGEOM_CAPSULE.value: 2,
    mujoco.mjtGeom.mjGEOM_ELLIPSOID.value: 1,
}
_FREE, _BALL = mujoco.mjtJoint.mjJNT_FREE.value, mujoco.mjtJoint.mjJNT_BALL.value
_POSES, _POSE_WORK = 64, 40_000  # random poses; fewer if poses x geoms exceed this
_SETTLE_S, _STEP_WORK = 0.5, 150_000  # simulated time [s]; less if physics steps x degrees of freedom exceed this
_MARGIN = 1.5  # safety factor on the trial's maximum


def buffer_sizes(scene: Scene, cfg: SimConfig) -> tuple[int, int]:
    """Return constraint rows and contacts per world: from the settings, else (rows) from the scene, else estimated."""
    rows, contacts = cfg.njmax or scene.njmax, cfg.nconmax
    estimated = (0, 0) if rows and contacts else estimate_buffers(scene.model)
    return rows or estimated[0], contacts or estimated[1]


def estimate_buffers(model: mujoco.MjModel) -> tuple[int, int]:
    """Estimate constraint rows and contacts to allocate per world; rows are a limit per world, contacts are pooled.

    The estimate assumes half of all possible contacts with the ground, and some contacts between other geoms. That is
    over twice what a tumbling Ant uses; a short trial in MuJoCo may raise the estimate.
    """
    plane, hfield = mujoco.mjtGeom.mjGEOM_PLANE.value, mujoco.mjtGeom.mjGEOM_HFIELD.value
    touch = may_touch(model)
    is_plane, is_hfield = model.geom_type == plane, model.geom_type == hfield
    most = np.array([_PLANE_CONTACTS.get(kind, 4) for kind in model.geom_type.tolist()])
    ground = int((touch[is_plane] * most).sum() + 4 * (touch[is_hfield] * most).sum())
    near = int(touch[:, ~(is_plane | is_hfield)].any(axis=1).sum())
    contacts = min(ground, 8 + ground // 2) + min(near, 6 + near // 4) + 4 * model.npair
    objects = int((model.jnt_type == _FREE).sum())
    if objects > 2:  # a heap of 100 boxes has 4.1 contacts per box
        contacts = max(contacts, 5 * objects)

    dims = [*model.geom_condim[touch.any(axis=1)].tolist(), *model.pair_dim.tolist()]
    dim = max(dims, default=1)
    pyramidal = model.opt.cone == mujoco.mjtCone.mjCONE_PYRAMIDAL.value
    rows = contacts * (2 * (dim - 1) if pyramidal and dim > 1 else dim)
    for flags in (model.jnt_limited, model.tendon_limited, model.dof_frictionloss, model.tendon_frictionloss):
        rows += int(np.count_nonzero(flags))
    rows += 6 * model.neq  # welds have the most rows
    seen_rows, seen_contacts = _trial(model, touch & ~(is_plane | is_plane[:, None]))
    return _round_up(max(rows, _MARGIN * seen_rows)), _round_up(max(contacts, _MARGIN * seen_contacts))


def contact_matches(scene: Scene) -> int:
    """Return the number of contacts that a sensor must sum, as a power of two: all with the ground and 8 more."""
    model, bodies = scene.model, [scene.model.body(name).id for name in scene.contact_sensors]
    if len(bodies) < np.count_nonzero(model.sensor_type == mujoco.mjtSensor.mjSENS_CONTACT):
        return 64  # MuJoCo Warp's default, for sensors of the user's file
    most = np.array([_PLANE_CONTACTS.get(kind, 4) for kind in model.geom_type.tolist()])
    most *= 4 if model.nhfield else 1
    need = 8 + max((int(most[model.geom_bodyid == body].sum()) for body in bodies), default=0)
    return min(64, 1 << (need - 1).bit_length())


def enough(room: Mapping[str, int], needs: Mapping[str, float]) -> str:
    """Format buffer settings that cover the needs with a margin: `sim.njmax=192 sim.nconmax=64`."""
    sizes = {n: _round_up(max(1.5 * needs[n], size * (2 if needs[n] > size else 1))) for n, size in room.items()}
    return " ".join(f"sim.{name}={size}" for name, size in sizes.items())


def _trial(model: mujoco.MjModel, touch: np.ndarray) -> tuple[int, int]:
    """Return the most constraint rows, and most contacts or candidate pairs, in random poses and a short simulation."""
    model, random = copy.copy(model), np.random.default_rng(0)
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET.value | mujoco.mjtDisableBit.mjDSBL_SENSOR.value
    data = mujoco.MjData(model)
    pairs = np.argwhere(np.triu(touch))
    most = [0, 0]

    def count(*, candidates: bool) -> None:
        near = _near(model, data, pairs) if candidates else 0
        most[:] = max(most[0], data.nefc), max(most[1], data.ncon, near)

    mujoco.mj_fwdPosition(model, data)
    count(candidates=True)
    limited = model.jnt_limited.astype(bool)
    for _ in range(min(_POSES, max(8, _POSE_WORK // max(1, model.ngeom)))):
        for j in range(model.njnt):
            q, kind = model.jnt_qposadr[j], model.jnt_type[j]
            if kind in (_FREE, _BALL):
                first, quat = q + 3 * (kind == _FREE), random.normal(size=4)
                data.qpos[first : first + 4] = quat / np.linalg.norm(quat)
            else:
                low, high = model.jnt_range[j] if limited[j] else (-math.pi, math.pi)
                data.qpos[q] = random.uniform(low, high)
        mujoco.mj_fwdPosition(model, data)
        count(candidates=True)

    mujoco.mj_resetData(model, data)
    steps = math.ceil(min(_SETTLE_S / model.opt.timestep, max(30, _STEP_WORK // max(1, model.nv))))
    low, high = np.where(model.actuator_ctrllimited[:, None], model.actuator_ctrlrange, 0.0).T
    for step in range(steps):
        if 2 * step >= steps and step % 10 == 0:
            data.ctrl[:] = random.uniform(low, high)
        mujoco.mj_step(model, data)
        if not np.isfinite(data.qacc).all() or np.abs(data.qvel).max(initial=0.0) > 1e4:
            break  # diverged: MuJoCo would log warnings
        count(candidates=False)
    return most[0], most[1]


def may_touch(model: mujoco.MjModel) -> np.ndarray:
    """Return a mask of geom pairs that can touch under MuJoCo's rules, excluding `<pair>`s; shape [ngeom, ngeom]."""
    body = model.geom_bodyid
    weld = model.body_weldid[body]
    still, parent = model.body_dofnum[weld] == 0, model.body_weldid[model.body_parentid[weld]]
    child = (weld[:, None] == parent) & (weld != 0) & (weld[:, None] != 0)
    child &= not model.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_FILTERPARENT
    wants = (model.geom_contype[:, None] & model.geom_conaffinity) != 0
    apart = (weld[:, None] == weld) | (still[:, None] & still) | child | child.T
    apart |= np.isin(np.minimum.outer(body, body) * 65536 + np.maximum.outer(body, body), model.exclude_signature)
    return (wants | wants.T) & ~apart


def _near(model: mujoco.MjModel, data: mujoco.MjData, pairs: np.ndarray) -> int:
    axes = data.geom_xmat.reshape(-1, 3, 3)
    middle = data.geom_xpos + np.einsum("gij,gj->gi", axes, model.geom_aabb[:, :3])
    half = np.einsum("gij,gj->gi", np.abs(axes), model.geom_aabb[:, 3:]) + model.geom_margin[:, None]
    one, two = pairs.T
    return int((np.abs(middle[one] - middle[two]) <= half[one] + half[two]).all(axis=1).sum())


def _round_up(number: float) -> int:
    return max(16, 16 * math.ceil(number / 16))
