"""Constraint rows and contacts that MuJoCo Warp allocates for each world."""

from __future__ import annotations

import math

import mujoco
import numpy as np

from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.sim.scene import Scene

# Contacts that a plane makes with a geom of each type; with the others up to four.
_PLANE_CONTACTS = {
    mujoco.mjtGeom.mjGEOM_SPHERE.value: 1,
    mujoco.mjtGeom.mjGEOM_CAPSULE.value: 2,
    mujoco.mjtGeom.mjGEOM_ELLIPSOID.value: 1,
}


def buffer_sizes(scene: Scene, cfg: SimConfig) -> tuple[int, int]:
    """Returns constraint rows and contacts per world: of the settings, else of the scene, else estimated."""
    rows, contacts = estimate_buffers(scene.model)
    return cfg.njmax or scene.njmax or rows, cfg.nconmax or contacts


def estimate_buffers(model: mujoco.MjModel) -> tuple[int, int]:
    """Returns constraint rows and contacts to allocate per world, for a scene that nobody has measured.

    A few geoms may touch the ground with all the contacts that they can have, many geoms only with half of them; of the
    geoms that can touch each other only some do at a time. This is more than twice what Ant needs when it is thrown
    around. Rows are a limit for each world; contacts, and the candidate pairs that share their buffer, are pooled over
    all worlds.
    """
    plane, hfield = mujoco.mjtGeom.mjGEOM_PLANE.value, mujoco.mjtGeom.mjGEOM_HFIELD.value
    wants, accepts = model.geom_contype, model.geom_conaffinity
    body = model.body_weldid[model.geom_bodyid]
    touch = ((wants[:, None] & accepts) | (wants & accepts[:, None])) != 0
    touch &= body[:, None] != body
    is_plane, is_hfield = model.geom_type == plane, model.geom_type == hfield
    most = np.array([_PLANE_CONTACTS.get(kind, 4) for kind in model.geom_type.tolist()])
    ground = int((touch[is_plane] * most).sum() + 4 * (touch[is_hfield] * most).sum())
    near = int(touch[:, ~(is_plane | is_hfield)].any(axis=1).sum())
    contacts = min(ground, 8 + ground // 2) + min(near, 6 + near // 4) + 4 * model.npair

    dims = [*model.geom_condim[touch.any(axis=1)].tolist(), *model.pair_dim.tolist()]
    dim = max(dims, default=1)
    pyramidal = model.opt.cone == mujoco.mjtCone.mjCONE_PYRAMIDAL.value
    rows = contacts * (2 * (dim - 1) if pyramidal and dim > 1 else dim)
    for flags in (model.jnt_limited, model.tendon_limited, model.dof_frictionloss, model.tendon_frictionloss):
        rows += int(np.count_nonzero(flags))
    rows += 6 * model.neq  # a weld has the most
    return _round_up(rows), _round_up(contacts)


def _round_up(number: int) -> int:
    return max(16, 16 * math.ceil(number / 16))
