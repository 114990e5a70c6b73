"""Model constants that MuJoCo derives from masses, updated in selected worlds of MuJoCo Warp.

`mujoco_warp.set_const` updates all worlds, in hundreds of launches. Inverse weights refer to the reference pose, which
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


def constants_of(model: mujoco.MjModel) -> list[str]:
    """Return the names of the constants that MuJoCo derives for this model."""
    names = ["body_subtreemass", "body_invweight0"]
    names += ["dof_invweight0"] if model.nv else []
    names += ["tendon_invweight0"] if model.ntendon else []
    return names + (["actuator_acc0"] if has_muscles(model) else [])


# pyright: reportInvalidTypeForm=false
# Warp compiles kernels; type checkers do not understand their array types.
_Floats = wp.array2d(dtype=float)
_Ints = wp.array(dtype=int)
_Vectors = wp.array2d(dtype=wp.vec3)
_Frames = wp.array(dtype=wp.mat33)
_Matrices = wp.array3d(dtype=float)

PARAMETERS = ("body_mass", "body_inertia", "body_ipos", "dof_armature", "actuator_gear", "actuator_armature")
STRUCTURE = ("dof_bodyid", "dof_parentid", "body_subtreenum", "body_weldid")


class _Fields:
    where: wp.array(dtype=wp.bool)
    # from the model
    body_mass: _Floats
    body_inertia: _Vectors
    body_ipos: _Vectors
    dof_armature: _Floats
    actuator_gear: wp.array2d(dtype=wp.spatial_vector)
    actuator_armature: _Floats
    dof_bodyid: _Ints
    dof_parentid: _Ints
    body_subtreenum: _Ints
    body_weldid: _Ints
    # in the reference pose
    lin: _Vectors  # Jacobian of a body's origin, [nbody, nv]
    ang: _Vectors
    frames: _Frames
    axes: _Frames  # principal axes of inertia
    extra: _Floats  # inertia of tendons, [nv, nv]
    tendons: _Floats  # Jacobian, [ntendon, nv]
    moments: _Floats  # with unit gear, [actuator outputs, nv]
    # from the kinematic tree
    armed: _Ints  # actuators with an armature
    last: _Ints  # last dof that moves a body; the others are its ancestors
    first: _Ints  # first dof of a joint's translations or rotations, which share a weight
    shared_by: _Ints
    # workspace, [num_envs, nv, nv]
    matrix: _Matrices
    inverse: _Matrices


_Inputs = wp.struct(_Fields)  # not as a decorator: type checkers' import hooks would wrap it


class Constants:
    """Kernels that update a model's derived constants (`constants_of`) in the worlds of the mask `where`.

    Inputs have one row per world or one shared row; constants have one row per world. `source` is the initial model of
    all worlds. Create instances within `WarpGraphs.scope`.
    """

    def __init__(self, source: mujoco.MjModel, model: mjw.Model, where: wp.array) -> None:
        self._model, self._has_muscles, nv = model, has_muscles(source), source.nv
        data = mujoco.MjData(source)
        data.qpos[:] = source.qpos0
        mujoco.mj_fwdPosition(source, data)
        jacobians = np.zeros((source.nbody, 2, 3, nv))
        for body in range(source.nbody):
            mujoco.mj_jac(source, data, *jacobians[body], data.xpos[body], body)
        lin, ang = jacobians.transpose(1, 0, 3, 2)
        moments, armed = _unit_moments(source, data), np.flatnonzero(source.actuator_armature)
        reflected = source.actuator_armature[armed] * source.actuator_gear[armed, 0] ** 2
        rotors = np.einsum("k,kv,kw->vw", reflected, moments[armed], moments[armed])
        tendons = np.zeros((source.ntendon, nv))
        if source.ntendon:
            mujoco.mju_sparse2dense(tendons, data.ten_J, source.ten_J_rownnz, source.ten_J_rowadr, source.ten_J_colind)

        last = np.full(source.nbody, -1)
        for body in range(1, source.nbody):
            end = source.body_dofadr[body] + source.body_dofnum[body] - 1
            last[body] = end if source.body_dofnum[body] else last[source.body_parentid[body]]
        dofs, kind = np.arange(nv), source.jnt_type[source.dof_jntid]
        several = (kind == mujoco.mjtJoint.mjJNT_FREE.value) | (kind == mujoco.mjtJoint.mjJNT_BALL.value)
        within = dofs - source.jnt_dofadr[source.dof_jntid]

        self._inputs = inputs = _Inputs()
        inputs.where = where
        for name, values, dtype in (
            *(("lin", lin, wp.vec3), ("ang", ang, wp.vec3)),
            *(("frames", data.xmat.reshape(-1, 3, 3), wp.mat33), ("axes", data.ximat.reshape(-1, 3, 3), wp.mat33)),
            *(("extra", _extra_inertia(source, data, lin, ang) - rotors, float), ("tendons", tendons, float)),
            *(("moments", moments, float), ("armed", armed, int), ("last", last, int)),
            *(("first", np.where(several, dofs - within % 3, dofs), int), ("shared_by", np.where(several, 3, 1), int)),
        ):
            setattr(inputs, name, wp.array(values, dtype=dtype))
        for name in ("matrix", "inverse"):
            setattr(inputs, name, wp.zeros((where.shape[0], nv, nv), dtype=float))

    def derive(self) -> None:
        """Derive the constants of the masked worlds and clear the mask."""
        model, inputs = self._model, self._inputs
        for field in (*PARAMETERS, *STRUCTURE):
            setattr(inputs, field, getattr(model, field))
        num_envs, nv, _ = inputs.matrix.shape
        for kernel, size, outputs in (
            (_mass_matrix, nv, []),
            (_factorize, 1, []),
            (_invert, nv, []),
            (_body_constants, model.nbody, [model.body_subtreemass, model.body_invweight0]),
            (_dof_weights, nv, [model.dof_invweight0]),
            (_tendon_weights, model.ntendon, [model.tendon_invweight0]),
            (_muscle_accelerations, self._has_muscles * len(inputs.moments), [model.actuator_acc0]),
        ):
            wp.launch(kernel, dim=(num_envs, size), inputs=[inputs], outputs=outputs)
        inputs.where.zero_()


def _unit_moments(source: mujoco.MjModel, data: mujoco.MjData) -> np.ndarray:
    """Return actuator moments for unit gear, shape [actuator outputs, nv]."""
    moments = np.zeros((len(source.actuator_gear), source.nv))
    if len(moments):
        sparse = data.actuator_moment, data.moment_rownnz, data.moment_rowadr, data.moment_colind
        mujoco.mju_sparse2dense(moments, *sparse)
    gear = source.actuator_gear[:, :1]
    return moments / np.where(gear == 0.0, 1.0, gear)


def _extra_inertia(source: mujoco.MjModel, data: mujoco.MjData, lin: np.ndarray, ang: np.ndarray) -> np.ndarray:
    """Return the mass matrix without the contributions of links and joint armatures, shape [nv, nv]."""
    full = np.zeros((source.nv, source.nv))
    mujoco.mj_fullM(source, data, full)
    lever = data.xipos - data.xpos
    lin = lin + np.cross(ang, lever[:, None])
    ang = np.einsum("bij,bvi->bvj", data.ximat.reshape(-1, 3, 3), ang)
    bodies = np.einsum("b,bvi,bwi->vw", source.body_mass, lin, lin)
    return full - bodies - np.einsum("bi,bvi,bwi->vw", source.body_inertia, ang, ang) - np.diag(source.dof_armature)


@no_type_check
@wp.func
def _lin_of_com(m: _Inputs, body: int, dof: int, lever: wp.vec3):
    return m.lin[body, dof] + wp.cross(m.ang[body, dof], lever)


@no_type_check
@wp.kernel
def _mass_matrix(m: _Inputs):
    # One dof's row of the mass matrix: the dof and its ancestors; the other entries are zero.
    world, dof = wp.tid()
    if not m.where[world]:
        return
    first = m.dof_bodyid[dof]
    other = int(dof)
    while other >= 0:
        total = m.extra[dof, other]
        if other == dof:
            total += m.dof_armature[world % m.dof_armature.shape[0], dof]
        for body in range(first, first + m.body_subtreenum[first]):
            lever = m.frames[body] * m.body_ipos[world % m.body_ipos.shape[0], body]
            one = _lin_of_com(m, body, dof, lever)
            two = _lin_of_com(m, body, other, lever)
            total += m.body_mass[world % m.body_mass.shape[0], body] * wp.dot(one, two)
            turned = wp.transpose(m.axes[body]) * m.ang[body, other]
            weighted = wp.cw_mul(m.body_inertia[world % m.body_inertia.shape[0], body], turned)
            total += wp.dot(wp.transpose(m.axes[body]) * m.ang[body, dof], weighted)
        for k in range(m.armed.shape[0]):
            actuator = m.armed[k]
            ratio = m.actuator_gear[world % m.actuator_gear.shape[0], actuator][0]
            rotor = m.actuator_armature[world % m.actuator_armature.shape[0], actuator] * ratio * ratio
            total += rotor * m.moments[actuator, dof] * m.moments[actuator, other]
        m.matrix[world, dof, other] = total
        other = m.dof_parentid[other]


@no_type_check
@wp.kernel
def _factorize(m: _Inputs):
    # Like mj_factorM: L^T D L in place, L as sparse as the tree, D on the diagonal.
    world, _ = wp.tid()
    if not m.where[world]:
        return
    for back in range(m.matrix.shape[1]):
        k = m.matrix.shape[1] - 1 - back
        i = m.dof_parentid[k]
        while i >= 0:
            ratio = m.matrix[world, k, i] / m.matrix[world, k, k]
            j = i
            while j >= 0:
                m.matrix[world, i, j] -= ratio * m.matrix[world, k, j]
                j = m.dof_parentid[j]
            m.matrix[world, k, i] = ratio
            i = m.dof_parentid[i]


@no_type_check
@wp.kernel
def _invert(m: _Inputs):
    # Row of the symmetric inverse: the solution for a unit vector.
    world, row = wp.tid()
    if not m.where[world]:
        return
    for i in range(m.inverse.shape[2]):
        m.inverse[world, row, i] = 0.0
    m.inverse[world, row, row] = 1.0
    k = int(row)
    while k >= 0:
        i = m.dof_parentid[k]
        while i >= 0:
            m.inverse[world, row, i] -= m.matrix[world, k, i] * m.inverse[world, row, k]
            i = m.dof_parentid[i]
        k = m.dof_parentid[k]
    for k in range(m.inverse.shape[2]):
        total = m.inverse[world, row, k] / m.matrix[world, k, k]
        i = m.dof_parentid[k]
        while i >= 0:
            total -= m.matrix[world, k, i] * m.inverse[world, row, i]
            i = m.dof_parentid[i]
        m.inverse[world, row, k] = total


@no_type_check
@wp.kernel
def _body_constants(m: _Inputs, subtreemass: _Floats, invweight: wp.array2d(dtype=wp.vec2)):
    world, body = wp.tid()
    if not m.where[world]:
        return
    total = float(0.0)
    for below in range(body, body + m.body_subtreenum[body]):
        total += m.body_mass[world % m.body_mass.shape[0], below]
    subtreemass[world, body] = total

    # Mean of the diagonal of J M^-1 J^T, for translations and for rotations.
    lever = m.frames[body] * m.body_ipos[world % m.body_ipos.shape[0], body]
    lin_weight, ang_weight = float(0.0), float(0.0)
    if m.body_weldid[body] != 0:
        i = m.last[body]
        while i >= 0:
            lin_i = _lin_of_com(m, body, i, lever)
            j = m.last[body]
            while j >= 0:
                element = m.inverse[world, i, j] / 3.0
                lin_weight += element * wp.dot(lin_i, _lin_of_com(m, body, j, lever))
                ang_weight += element * wp.dot(m.ang[body, i], m.ang[body, j])
                j = m.dof_parentid[j]
            i = m.dof_parentid[i]
    # Like MuJoCo, replace a zero weight with the other weight.
    if lin_weight < _MIN:
        lin_weight = ang_weight
    elif ang_weight < _MIN:
        ang_weight = lin_weight
    invweight[world, body] = wp.vec2(lin_weight, ang_weight)


@no_type_check
@wp.kernel
def _dof_weights(m: _Inputs, invweight: _Floats):
    world, dof = wp.tid()
    if not m.where[world]:
        return
    total = float(0.0)
    for i in range(m.first[dof], m.first[dof] + m.shared_by[dof]):
        total += m.inverse[world, i, i]
    invweight[world, dof] = total / float(m.shared_by[dof])


@no_type_check
@wp.kernel
def _tendon_weights(m: _Inputs, invweight: _Floats):
    world, tendon = wp.tid()
    if not m.where[world]:
        return
    total = float(0.0)
    for i in range(m.inverse.shape[1]):
        for j in range(m.inverse.shape[1]):
            total += m.tendons[tendon, i] * m.inverse[world, i, j] * m.tendons[tendon, j]
    invweight[world, tendon] = total


@no_type_check
@wp.kernel
def _muscle_accelerations(m: _Inputs, acc: _Floats):
    # Norm of M^-1 times the moment vector.
    world, actuator = wp.tid()
    if not m.where[world]:
        return
    total = float(0.0)
    for i in range(m.inverse.shape[1]):
        of_dof = float(0.0)
        for j in range(m.inverse.shape[1]):
            of_dof += m.inverse[world, i, j] * m.moments[actuator, j]
        total += of_dof * of_dof
    acc[world, actuator] = wp.sqrt(total) * wp.abs(m.actuator_gear[world % m.actuator_gear.shape[0], actuator][0])
