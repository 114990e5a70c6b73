"""Model constants that MuJoCo derives from masses, updated in selected worlds of MuJoCo Warp.

`mujoco_warp.set_const` updates all worlds in hundreds of launches. Inverse weights belong to the reference pose, which
all worlds share, so Jacobians are computed once and a few kernels do the rest.
"""

from __future__ import annotations

from typing import no_type_check

import mujoco
import mujoco_warp as mjw
import numpy as np
import warp as wp

wp.set_module_options({"enable_backward": False})
_MUSCLE = mujoco.mjtGain.mjGAIN_MUSCLE.value
_MIN = mujoco.mjMINVAL


def has_muscles(model: mujoco.MjModel) -> bool:
    """Return whether the model has muscles, the only users of `actuator_acc0`."""
    return bool((model.actuator_gaintype == _MUSCLE).any())


def uses_gear(model: mujoco.MjModel) -> bool:
    """Return whether a constant depends on an actuator's gear."""
    return has_muscles(model) or bool(model.actuator_armature.any())


def constants_of(model: mujoco.MjModel) -> list[str]:
    """Return the names of the model's derived constants."""
    names = ["body_subtreemass", "body_invweight0"]
    names += ["dof_invweight0"] if model.nv else []
    names += ["tendon_invweight0"] if model.ntendon else []
    return names + (["actuator_acc0"] if has_muscles(model) else [])


class Constants:
    """Kernels that derive the `constants_of` a model in the worlds of the mask `where`.

    `body_mass`, `body_inertia`, `body_ipos`, `dof_armature` and `actuator_gear` have one row per world or one shared
    row; the constants have one per world. An actuator adds its armature times its squared gear to its joint or tendon.
    `source` is the model that all worlds started from. Create it within `WarpGraphs.scope`.
    """

    def __init__(self, source: mujoco.MjModel, model: mjw.Model, where: wp.array) -> None:
        self._model = model
        self._where = where
        self._num_envs, nv = where.shape[0], source.nv
        data = mujoco.MjData(source)
        data.qpos[:] = source.qpos0
        mujoco.mj_fwdPosition(source, data)
        lin, ang = np.zeros((2, source.nbody, nv, 3))
        for body in range(source.nbody):
            lin_of_body, ang_of_body = np.zeros((2, 3, nv))
            mujoco.mj_jac(source, data, lin_of_body, ang_of_body, data.xpos[body], body)
            lin[body], ang[body] = lin_of_body.T, ang_of_body.T
        self._lin, self._ang = wp.array(lin, dtype=wp.vec3), wp.array(ang, dtype=wp.vec3)
        self._frames = wp.array(data.xmat.reshape(-1, 3, 3), dtype=wp.mat33)
        self._axes = wp.array(data.ximat.reshape(-1, 3, 3), dtype=wp.mat33)
        moments = _unit_moments(source, data)
        armed = np.flatnonzero(source.actuator_armature)
        reflected = source.actuator_armature[armed] * source.actuator_gear[armed, 0] ** 2
        of_actuators = np.einsum("k,kv,kw->vw", reflected, moments[armed], moments[armed])
        extra = _beside_links(source, data, lin, ang) - of_actuators
        self._extra, self._armed = wp.array(extra, dtype=float), wp.array(armed, dtype=int)

        # The last dof that moves a body; the others are those that it hangs on.
        last = np.full(source.nbody, -1)
        for body in range(1, source.nbody):
            end = source.body_dofadr[body] + source.body_dofnum[body] - 1
            last[body] = end if source.body_dofnum[body] else last[source.body_parentid[body]]
        self._last = wp.array(last, dtype=int)

        # Dofs of one joint share their weight: translations, rotations, or the one that there is.
        kind = source.jnt_type[source.dof_jntid]
        several = (kind == mujoco.mjtJoint.mjJNT_FREE.value) | (kind == mujoco.mjtJoint.mjJNT_BALL.value)
        within = np.arange(nv) - source.jnt_dofadr[source.dof_jntid]
        self._first = wp.array(np.where(several, np.arange(nv) - within % 3, np.arange(nv)), dtype=int)
        self._shared_by = wp.array(np.where(several, 3, 1), dtype=int)

        tendons = np.zeros((source.ntendon, nv))
        if source.ntendon:
            mujoco.mju_sparse2dense(tendons, data.ten_J, source.ten_J_rownnz, source.ten_J_rowadr, source.ten_J_colind)
        self._tendons = wp.array(tendons, dtype=float)
        self._moments = wp.array(moments, dtype=float)
        self._has_muscles = has_muscles(source)

        self._matrix = wp.zeros((self._num_envs, nv, nv), dtype=float)
        self._inverse = wp.zeros((self._num_envs, nv, nv), dtype=float)

    def derive(self) -> None:
        """Derive the constants of the masked worlds and clear the mask."""
        model, where = self._model, self._where
        matrix, inverse, parent = self._matrix, self._inverse, model.dof_parentid
        num, nv = self._num_envs, matrix.shape[1]
        jacobian = [self._lin, self._ang, self._frames, model.body_ipos]
        subtree, tree = model.body_subtreenum, [model.dof_bodyid, parent, model.body_subtreenum]
        masses = [model.body_mass, model.body_inertia, model.dof_armature]
        actuators = [self._armed, self._moments, model.actuator_armature, model.actuator_gear]
        wp.launch(
            _mass_matrix,
            dim=(num, nv),
            inputs=[where, *tree, *jacobian, self._axes, self._extra, *masses, *actuators],
            outputs=[matrix],
        )
        wp.launch(_factorize, dim=num, inputs=[where, parent, matrix])
        wp.launch(_invert, dim=(num, nv), inputs=[where, parent, matrix], outputs=[inverse])
        wp.launch(
            _body_constants,
            dim=(num, model.nbody),
            inputs=[where, self._last, parent, subtree, model.body_weldid, *jacobian, model.body_mass, inverse],
            outputs=[model.body_subtreemass, model.body_invweight0],
        )
        wp.launch(
            _dof_weights,
            dim=(num, nv),
            inputs=[where, self._first, self._shared_by, inverse],
            outputs=[model.dof_invweight0],
        )
        wp.launch(
            _tendon_weights,
            dim=(num, model.ntendon),
            inputs=[where, self._tendons, inverse],
            outputs=[model.tendon_invweight0],
        )
        if self._has_muscles:
            wp.launch(
                _muscle_accelerations,
                dim=(num, self._moments.shape[0]),
                inputs=[where, self._moments, model.actuator_gear, inverse],
                outputs=[model.actuator_acc0],
            )
        where.zero_()


def _unit_moments(source: mujoco.MjModel, data: mujoco.MjData) -> np.ndarray:
    """Return actuator moments for unit gear, shape [actuator outputs, nv]."""
    moments = np.zeros((len(source.actuator_gear), source.nv))
    if len(moments):
        mujoco.mju_sparse2dense(
            moments, data.actuator_moment, data.moment_rownnz, data.moment_rowadr, data.moment_colind
        )
    gear = source.actuator_gear[:, :1]
    return moments / np.where(gear == 0.0, 1.0, gear)


def _beside_links(source: mujoco.MjModel, data: mujoco.MjData, lin: np.ndarray, ang: np.ndarray) -> np.ndarray:
    """Return the mass matrix without links and joint armatures, shape [nv, nv]."""
    full = np.zeros((source.nv, source.nv))
    mujoco.mj_fullM(source, data, full)
    lever = data.xipos - data.xpos
    lin = lin + np.cross(ang, lever[:, None])
    ang = np.einsum("bij,bvi->bvj", data.ximat.reshape(-1, 3, 3), ang)
    bodies = np.einsum("b,bvi,bwi->vw", source.body_mass, lin, lin)
    return full - bodies - np.einsum("bi,bvi,bwi->vw", source.body_inertia, ang, ang) - np.diag(source.dof_armature)


# Kernels are compiled: no checker of Python's types understands their arrays.
Floats = wp.array2d(dtype=float)
Vectors = wp.array2d(dtype=wp.vec3)
Matrices = wp.array3d(dtype=float)
Mask = wp.array(dtype=wp.bool)
Ints = wp.array(dtype=int)
Frames = wp.array(dtype=wp.mat33)


@no_type_check
@wp.func
def _lin_of_com(body: int, dof: int, lin: Vectors, ang: Vectors, lever: wp.vec3):
    # Jacobian of a body's centre of mass.
    return lin[body, dof] + wp.cross(ang[body, dof], lever)


@no_type_check
@wp.kernel
def _mass_matrix(
    where: Mask,
    dof_body: Ints,
    parent: Ints,
    subtree: Ints,
    lin: Vectors,
    ang: Vectors,
    frames: Frames,
    ipos: Vectors,
    axes: Frames,
    extra: Floats,
    mass: Floats,
    inertia: Vectors,
    armature: Floats,
    armed: Ints,
    moments: Floats,
    reflected: Floats,
    gear: wp.array2d(dtype=wp.spatial_vector),
    matrix: Matrices,
):
    # Of a dof, with those that it hangs on: the others' entries are zero.
    world, dof = wp.tid()
    if not where[world]:
        return
    first = dof_body[dof]
    other = int(dof)
    while other >= 0:
        total = extra[dof, other]
        if other == dof:
            total += armature[world % armature.shape[0], dof]
        for body in range(first, first + subtree[first]):
            lever = frames[body] * ipos[world % ipos.shape[0], body]
            one = _lin_of_com(body, dof, lin, ang, lever)
            two = _lin_of_com(body, other, lin, ang, lever)
            total += mass[world % mass.shape[0], body] * wp.dot(one, two)
            turned = wp.transpose(axes[body]) * ang[body, other]
            weighted = wp.cw_mul(inertia[world % inertia.shape[0], body], turned)
            total += wp.dot(wp.transpose(axes[body]) * ang[body, dof], weighted)
        for k in range(armed.shape[0]):
            actuator = armed[k]
            ratio = gear[world % gear.shape[0], actuator][0]
            inertia_of_rotor = reflected[world % reflected.shape[0], actuator] * ratio * ratio
            total += inertia_of_rotor * moments[actuator, dof] * moments[actuator, other]
        matrix[world, dof, other] = total
        other = parent[other]


@no_type_check
@wp.kernel
def _factorize(where: Mask, parent: Ints, matrix: Matrices):
    # As mj_factorM: L^T D L, where L has the tree's zeros. D stands on the diagonal.
    world = wp.tid()
    if not where[world]:
        return
    for back in range(matrix.shape[1]):
        k = matrix.shape[1] - 1 - back
        i = parent[k]
        while i >= 0:
            ratio = matrix[world, k, i] / matrix[world, k, k]
            j = i
            while j >= 0:
                matrix[world, i, j] -= ratio * matrix[world, k, j]
                j = parent[j]
            matrix[world, k, i] = ratio
            i = parent[i]


@no_type_check
@wp.kernel
def _invert(where: Mask, parent: Ints, factor: Matrices, inverse: Matrices):
    # A row of the inverse, which is symmetric: the solution for a unit vector.
    world, row = wp.tid()
    if not where[world]:
        return
    for i in range(inverse.shape[2]):
        inverse[world, row, i] = 0.0
    inverse[world, row, row] = 1.0
    k = int(row)
    while k >= 0:
        i = parent[k]
        while i >= 0:
            inverse[world, row, i] -= factor[world, k, i] * inverse[world, row, k]
            i = parent[i]
        k = parent[k]
    for k in range(inverse.shape[2]):
        total = inverse[world, row, k] / factor[world, k, k]
        i = parent[k]
        while i >= 0:
            total -= factor[world, k, i] * inverse[world, row, i]
            i = parent[i]
        inverse[world, row, k] = total


@no_type_check
@wp.kernel
def _body_constants(
    where: Mask,
    last: Ints,
    parent: Ints,
    subtree: Ints,
    weld: Ints,
    lin: Vectors,
    ang: Vectors,
    frames: Frames,
    ipos: Vectors,
    mass: Floats,
    inverse: Matrices,
    subtreemass: Floats,
    invweight: wp.array2d(dtype=wp.vec2),
):
    world, body = wp.tid()
    if not where[world]:
        return
    total = float(0.0)
    for below in range(body, body + subtree[body]):
        total += mass[world % mass.shape[0], below]
    subtreemass[world, body] = total

    # The mean of the diagonal of J M^-1 J^T, for translations and for rotations.
    lever = frames[body] * ipos[world % ipos.shape[0], body]
    of_lin, of_ang = float(0.0), float(0.0)
    if weld[body] != 0:
        i = last[body]
        while i >= 0:
            lin_i = _lin_of_com(body, i, lin, ang, lever)
            j = last[body]
            while j >= 0:
                element = inverse[world, i, j] / 3.0
                of_lin += element * wp.dot(lin_i, _lin_of_com(body, j, lin, ang, lever))
                of_ang += element * wp.dot(ang[body, i], ang[body, j])
                j = parent[j]
            i = parent[i]
    # As MuJoCo: where one of them is zero the other one stands for it.
    if of_lin < _MIN:
        of_lin = of_ang
    elif of_ang < _MIN:
        of_ang = of_lin
    invweight[world, body] = wp.vec2(of_lin, of_ang)


@no_type_check
@wp.kernel
def _dof_weights(where: Mask, first: Ints, shared_by: Ints, inverse: Matrices, invweight: Floats):
    world, dof = wp.tid()
    if not where[world]:
        return
    total = float(0.0)
    for i in range(first[dof], first[dof] + shared_by[dof]):
        total += inverse[world, i, i]
    invweight[world, dof] = total / float(shared_by[dof])


@no_type_check
@wp.kernel
def _tendon_weights(where: Mask, tendons: Floats, inverse: Matrices, invweight: Floats):
    world, tendon = wp.tid()
    if not where[world]:
        return
    total = float(0.0)
    for i in range(inverse.shape[1]):
        for j in range(inverse.shape[1]):
            total += tendons[tendon, i] * inverse[world, i, j] * tendons[tendon, j]
    invweight[world, tendon] = total


@no_type_check
@wp.kernel
def _muscle_accelerations(
    where: Mask, moments: Floats, gear: wp.array2d(dtype=wp.spatial_vector), inverse: Matrices, acc: Floats
):
    # The length of M^-1 moment.
    world, actuator = wp.tid()
    if not where[world]:
        return
    total = float(0.0)
    for i in range(inverse.shape[1]):
        of_dof = float(0.0)
        for j in range(inverse.shape[1]):
            of_dof += inverse[world, i, j] * moments[actuator, j]
        total += of_dof * of_dof
    acc[world, actuator] = wp.sqrt(total) * wp.abs(gear[world % gear.shape[0], actuator][0])
