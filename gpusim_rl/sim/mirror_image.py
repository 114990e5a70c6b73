"""Mirror image of a robot about its x-z plane. Vectors flip y; pseudovectors (angular velocity, torque) flip x, z."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from itertools import accumulate

import mujoco
import numpy as np
from jaxtyping import Float

from gpusim_rl.errors import TaskError
from gpusim_rl.sim.scene import Scene
from gpusim_rl.spaces import SignedPermutation

VECTOR = np.array([1.0, -1.0, 1.0])
PSEUDOVECTOR = np.array([-1.0, 1.0, -1.0])
QUATERNION = np.array([1.0, -1.0, 1.0, -1.0])
SLACK = 0.05  # tolerance of mirrored body positions, relative to the robot's size, and of joint axes
STATES = 16  # random states per measurement
WRONG = 0.5  # relative difference of mirrored accelerations that no symmetric robot reaches
_HINGE, _SLIDE = mujoco.mjtJoint.mjJNT_HINGE.value, mujoco.mjtJoint.mjJNT_SLIDE.value
_ON_JOINTS = (mujoco.mjtTrn.mjTRN_JOINT.value, mujoco.mjtTrn.mjTRN_JOINTINPARENT.value)
_LEFT_RIGHT = [("left", "right"), ("l", "r"), *((f"{end}l", f"{end}r") for end in "frhb")]
_LEFT_RIGHT += [(f"l{end}", f"r{end}") for end in "fhb"]
_OTHER_SIDE = {one: two for pair in _LEFT_RIGHT for one, two in (pair, pair[::-1])}


def other_side(name: str) -> str:
    """Swap left and right in a name: `FL_hip` -> `FR_hip`, `LeftFoot` -> `RightFoot`."""

    def swap(match: re.Match[str]) -> str:
        word = match[0]
        other = _OTHER_SIDE.get(word.lower(), word.lower())
        return other.upper() if word.isupper() else other.capitalize() if word[0].isupper() else other

    return re.sub(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", swap, name)


class MirrorImage:
    """Permutations and signs that mirror an articulation's elements about its root's x-z plane in the reference pose.

    Attributes:
        bodies: Counterpart of each body, by name.
        joints: Mirror map of joint positions and velocities, in the order of `Articulation.joint_names`.
        actuators: Mirror map of controls, in the order of `Articulation.actuator_names`.
    """

    def __init__(self, scene: Scene, name: str) -> None:
        self._scene, self._model, self._name = scene, scene.model, name
        self._data = mujoco.MjData(self._model)
        mujoco.mj_kinematics(self._model, self._data)
        bodies = scene.elements_of(name, "body")
        self._names = {i: label for label, i in bodies.items()}
        self._root = next(iter(self._names))
        self._pos = {i: self._in_root(self._data.xpos[i]) for i in self._names}
        self._reach = SLACK * max(float(np.linalg.norm(pos)) for pos in self._pos.values())
        self._partners = self._pair_bodies()
        self.bodies = {self._names[one]: self._names[two] for one, two in self._partners.items()}
        self._joints = scene.elements_of(name, "joint")
        self._joint_ids = list(self._joints.values())
        self._actuators = scene.elements_of(name, "actuator")
        self.joints = self._pair_joints()
        self.actuators = self._pair_actuators()

    def _in_root(self, pos: Float[np.ndarray, " 3"]) -> Float[np.ndarray, " 3"]:
        return self._turned(pos - self._data.xpos[self._root])

    def _turned(self, vector: Float[np.ndarray, " 3"]) -> Float[np.ndarray, " 3"]:
        return self._data.xmat[self._root].reshape(3, 3).T @ vector

    def _none(self, problem: str) -> TaskError:
        return TaskError(f"{self._name!r} has no mirror image about its x-z plane: {problem}")

    def _pair_bodies(self) -> dict[int, int]:
        """Pair children of paired bodies by mirrored position, then name; unmatched rigid parts mirror themselves."""
        names, pos, model = self._names, self._pos, self._model
        partners = {self._root: self._root}
        for body in names:
            if body == self._root:
                continue
            parent = partners[int(model.body_parentid[body])]
            free = [i for i in names if i not in partners.values() and model.body_parentid[i] == parent]
            wanted, named = pos[body] * VECTOR, other_side(names[body])
            away = {i: float(np.linalg.norm(pos[i] - wanted)) for i in free}
            close = [i for i in free if away[i] <= self._reach]
            best = min(close, key=lambda i: (names[i] != named, round(away[i], 6), i != body), default=None)
            if best is None and body == model.body_weldid[body]:  # a camera fixed to a link needs no counterpart
                raise self._none(f"body {names[body]!r} has no counterpart at {wanted.round(3).tolist()} m")
            partners[body] = body if best is None else best
        return partners

    def _pair_joints(self) -> SignedPermutation:
        model, names, ids = self._model, list(self._joints), self._joint_ids
        sources, signs = [0] * len(ids), [0.0] * len(ids)
        for k, (label, joint) in enumerate(self._joints.items()):
            body, kind = int(model.jnt_bodyid[joint]), int(model.jnt_type[joint])
            there, here = ([i for i in ids if model.jnt_bodyid[i] == owner] for owner in (self._partners[body], body))
            if len(there) != len(here) or model.jnt_type[there[here.index(joint)]] != kind:
                raise self._none(f"joint {label!r} has no counterpart on body {self.bodies[self._names[body]]!r}")
            other = there[here.index(joint)]
            # the axis of a hinge is a pseudovector, the axis of a slide is a vector
            wanted = (PSEUDOVECTOR if kind == _HINGE else VECTOR) * self._turned(self._data.xaxis[joint])
            along = float(wanted @ self._turned(self._data.xaxis[other]))
            to = ids.index(other)
            if abs(along) < 1.0 - SLACK:
                raise self._none(f"the axes of joints {label!r} and {names[to]!r} are not mirror images of each other")
            sources[to], signs[to] = k, float(np.sign(along))
            one, two = model.qpos0[model.jnt_qposadr[[joint, other]]]
            if abs(two - signs[to] * one) > SLACK:
                both = f"({one:.3g} and {two:.3g}) are not mirror images of each other"
                raise self._none(f"the reference positions of joints {label!r} and {names[to]!r} {both}")
        return SignedPermutation(sources, signs)

    def _pair_actuators(self) -> SignedPermutation:
        model, ids = self._model, self._joint_ids
        on: dict[int, list[int]] = {}
        for label, i in self._actuators.items():
            if model.actuator_trntype[i] not in _ON_JOINTS or model.actuator_trnid[i, 0] not in ids:
                raise self._none(f"actuator {label!r} does not act on a joint, so its mirror image is unknown")
            on.setdefault(int(model.actuator_trnid[i, 0]), []).append(i)
        sizes = [int(model.actuator_ctrlnum[i]) for i in self._actuators.values()]
        places = dict(zip(self._actuators.values(), accumulate(sizes, initial=0), strict=False))
        index, signs = [0] * sum(sizes), [1.0] * sum(sizes)
        for label, i in self._actuators.items():
            joint = int(model.actuator_trnid[i, 0])
            k = ids.index(joint)
            others, rank = on.get(ids[self.joints.sources[k]], []), on[joint].index(i)
            if len(others) != len(on[joint]) or model.actuator_ctrlnum[others[rank]] != model.actuator_ctrlnum[i]:
                raise self._none(f"actuator {label!r} has no counterpart")
            same = np.sign(model.actuator_gear[i, 0] * model.actuator_gear[others[rank], 0])
            for place in range(int(model.actuator_ctrlnum[i])):
                index[places[i] + place] = places[others[rank]] + place
                signs[places[i] + place] = float(same) * self.joints.signs[k]
        return SignedPermutation(index, signs)

    def among(self, names: Sequence[str]) -> list[int]:
        """Return, for each named body or site, the index of its counterpart in `names`; TaskError if one is missing."""
        sites = self._scene.elements_of(self._name, "site")
        index = []
        for name in names:
            if name in self.bodies:
                other = self.bodies[name]
            elif name in sites:
                pos = {other: self._in_root(self._data.site_xpos[sites[other]]) for other in names if other in sites}
                away = {other: float(np.linalg.norm(pos[other] - VECTOR * pos[name])) for other in pos}
                other = min(away, key=lambda other: (round(away[other], 6), other != name))
                if away[other] > self._reach:
                    raise self._none(f"site {name!r} has no counterpart among {list(names)}")
            else:
                raise TaskError(f"{self._name!r} has no body or site {name!r}")
            if other not in names:
                raise TaskError(f"missing {other!r}, the mirror image of {name!r}", got=list(names))
            index.append(list(names).index(other))
        return index

    def at_site(self, name: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Return matrices A and B [3, 3]: the mirror image of a site's velocity v is A v + B omega, in the site's axes.

        omega: angular velocity; `kind`: "vector" or "pseudovector". TaskError unless the site's body mirrors itself.
        """
        site = self._scene.elements_of(self._name, "site").get(name)
        if site is None or self._partners[body := int(self._model.site_bodyid[site])] != body:
            raise TaskError(f"{self._name!r} has no site {name!r} on a body in its plane of symmetry")
        axes = self._data.xmat[self._root].reshape(3, 3).T @ self._data.site_xmat[site].reshape(3, 3)
        pos = self._in_root(self._data.site_xpos[site])
        turn = np.cross(np.eye(3), pos - VECTOR * pos).T  # matrix of omega -> omega x (pos - mirrored pos)
        of_omega = axes.T @ turn @ np.diag(PSEUDOVECTOR) @ axes if kind == "vector" else np.zeros((3, 3))
        flip = np.diag(VECTOR if kind == "vector" else PSEUDOVECTOR)
        return (axes.T @ flip @ axes).round(9), of_omega.round(9)

    def measure(self) -> float:
        """Return the maximum relative error of mirrored accelerations in random states without contacts.

        Raise TaskError if the robot is not symmetric.
        """
        found = self._difference()
        if found < WRONG:
            return found
        flips: dict[tuple[str, str, float], float] = {}
        for kind, swap, of in (("joint", self.joints, self._joints), ("actuator", self.actuators, self._actuators)):
            for k, source in enumerate(swap.sources):
                swap.signs[k] *= -1.0
                flips[kind, list(of)[source % len(of)], swap.signs[k]] = self._difference()
                swap.signs[k] *= -1.0
        (kind, label, sign), least = min(flips.items(), key=lambda item: item[1])
        if least < WRONG:
            key = f"mirror image of {self._name!r}, {kind} {label!r}"
            raise TaskError("wrong sign", key=key, expected=f"{sign:+.0f}", got=-int(sign))
        raise self._none(f"accelerations differ from their mirror images by {100 * found:.0f} %")

    def _difference(self) -> float:
        model = copy.copy(self._model)
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_CONTACT
        random = np.random.default_rng(0)
        columns, dofs = (adr[self._joint_ids] for adr in (model.jnt_qposadr, model.jnt_dofadr))
        controls = list(self._actuators.values()) if len(self._actuators) == len(self.actuators.signs) else []
        changes = []
        for _ in range(STATES):
            one, two = mujoco.MjData(model), mujoco.MjData(model)
            one.qpos[columns] += random.uniform(-0.2, 0.2, len(columns))
            one.qvel[:] = random.normal(size=model.nv)
            one.ctrl[controls] = random.uniform(-1.0, 1.0, len(controls))
            two.qpos[columns], two.qvel[:] = _swapped(one.qpos[columns], self.joints), self._per_joint(one.qvel, dofs)
            two.ctrl[controls] = _swapped(one.ctrl[controls], self.actuators) if controls else []
            before = one.qvel.copy(), two.qvel.copy()
            for data in (one, two):
                mujoco.mj_step(model, data)
            changes.append((self._per_joint(one.qvel - before[0], dofs), two.qvel - before[1]))
        expected, got = np.array(changes).swapaxes(0, 1)
        largest = np.abs(expected).max(axis=0)
        return float((np.abs(got - expected).max(axis=0) / np.maximum(largest, 1e-3 * largest.max())).max())

    def _per_joint(self, values: Float[np.ndarray, " nv"], dofs: np.ndarray) -> Float[np.ndarray, " nv"]:
        image, free = values.copy(), int(self._model.body_jntadr[self._root])
        image[dofs] = _swapped(values[dofs], self.joints)
        if free >= 0 and self._model.jnt_type[free] == mujoco.mjtJoint.mjJNT_FREE:
            first = int(self._model.jnt_dofadr[free])
            image[first : first + 6] *= np.append(VECTOR, PSEUDOVECTOR)
        return image


def _swapped(values: Float[np.ndarray, " size"], swap: SignedPermutation) -> Float[np.ndarray, " size"]:
    return values[swap.sources] * swap.signs
