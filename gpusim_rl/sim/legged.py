"""Legged robots: infer feet, standing pose and motors from the model."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import mujoco
import numpy as np

from gpusim_rl.errors import TaskError, available
from gpusim_rl.sim.scene import Scene

ARMATURE = 1.7e-4  # guessed armature per maximum torque [kg m^2 / N m]; Go1, Go2 and G1 have 1.4e-4 to 3.3e-4
SAG = 0.2  # servo error under the robot's weight that a guessed armature allows [rad]; Go1's is 0.22
SERVO_HZ = 10.0  # natural frequency of the velocity tasks' servos
SCALE = 0.3  # action scale of joints whose armature was guessed from a load [rad]; Go1's is 0.31
FOOT = re.compile(r"foot|feet|toe|ankle|sole|paw|calf_?tip", re.IGNORECASE)
TORSO = re.compile(r"torso|trunk|chest", re.IGNORECASE)
SOLE = 0.02  # foot shapes within this height of the lowest shape touch the ground [m]
LOW = 0.15  # fraction of the root's height below which limb ends are feet
BENT = {True: 0.94, False: 0.7}  # hip height in the standing pose, as a fraction of the leg's reach: bipeds, others
_HINGE, _SLIDE = mujoco.mjtJoint.mjJNT_HINGE.value, mujoco.mjtJoint.mjJNT_SLIDE.value
_JOINT, _NONE = mujoco.mjtTrn.mjTRN_JOINT.value, mujoco.mjtBias.mjBIAS_NONE.value
_GEOM = mujoco.mjtGeom


@dataclass(frozen=True, kw_only=True)
class Foot:
    """Body or collision shape that stands on the ground.

    Attributes:
        item: `body:<name>` or `geom:<name>`.
        sole: Centre of the foot's shapes, moved down to their lowest point in the standing pose; body frame [m].
        place: Horizontal position of `sole` relative to the root: forward, left [m].
    """

    item: str
    body: str
    sole: tuple[float, ...]
    place: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class LeggedRobot:
    """Legged robot; names are as in the file.

    Attributes:
        torso: Body to keep upright.
        imu: IMU site, if any.
        pose: Joint positions of the standing pose [rad or m].
        height: Height of the root in the pose [m].
        motors: Armature [kg m^2] and maximum torque [N m] of each joint.
        scales: Action scale of joints whose armature was guessed from a load [rad].
        knees: Second pitch joint of each leg.
        pitches: Other leg joints about the y axis.
        notes: Descriptions of guessed values, one line each.
    """

    root: str
    torso: str
    imu: str | None
    feet: list[Foot]
    pose: dict[str, float]
    height: float
    motors: dict[str, tuple[float, float]]
    scales: dict[str, float]
    knees: list[str]
    pitches: list[str]
    notes: list[str]

    @property
    def trot(self) -> tuple[float, ...]:
        """Sign of each foot's phase in a trot, in the order of `feet`; feet of the same sign swing together."""

        def order(foot: Foot) -> int:  # rank from the front, shifted by one on the left side
            x, y = foot.place
            return (y > 0) + sum(other.place[0] > x for other in self.feet if (other.place[1] > 0) == (y > 0))

        return tuple(-1.0 if order(foot) % 2 else 1.0 for foot in self.feet)


def read_legged(scene: Scene, name: str, feet: Sequence[str] = ()) -> LeggedRobot:
    """Infer the data for a walking task; TaskError without a floating base or feet, or if joints are coupled.

    `feet` are bodies or shapes; default: limb ends with a name such as foot or toe, else the lowest limb ends. The pose
    is the scene's reference pose if any joint is nonzero; otherwise the legs are bent, with each foot below its hip.
    """
    return _Reader(scene, name).read(feet)


class _Reader:
    def __init__(self, scene: Scene, name: str) -> None:
        self.model = model = scene.model
        self.prefix, self.bodies = scene.prefix(name), scene.bodies_of(name)
        self.data, self.notes, self.scales = mujoco.MjData(model), list[str](), dict[str, float]()
        self.body_of: list[int] = model.geom_bodyid.tolist()
        root_joints = [j for j in range(model.njnt) if model.jnt_bodyid[j] in self.bodies[:1]]
        if not root_joints or model.jnt_type[root_joints[0]] != mujoco.mjtJoint.mjJNT_FREE:
            raise TaskError("the robot has no floating base: its first body has no free joint", hint="Try --free-base")
        self.root, base = self.bodies[0], model.jnt_qposadr[root_joints[0]]
        self.data.qpos[base + 3 : base + 7] = 1.0, 0.0, 0.0, 0.0
        moving = np.isin(model.jnt_type, (_HINGE, _SLIDE)) & np.isin(model.jnt_bodyid, self.bodies)
        self.joints: list[int] = np.flatnonzero(moving).tolist()
        for first in model.eq_obj1id[model.eq_type == mujoco.mjtEq.mjEQ_JOINT].tolist():
            problem = f"joint {self.name('joint', first)!r} is coupled to another joint and cannot have its own motor"
            raise TaskError(problem, hint="Try removing the joint's equality constraint from the file")
        touches = (model.geom_contype | model.geom_conaffinity) > 0
        self.shapes = [g for g in range(model.ngeom) if self.body_of[g] in self.bodies and touches[g]]

    def name(self, kind: str, i: int) -> str:
        return getattr(self.model, kind)(i).name.removeprefix(self.prefix)

    def read(self, names: Sequence[str]) -> LeggedRobot:
        model, data = self.model, self.data
        stands = bool(model.qpos0[model.jnt_qposadr[self.joints]].any())
        for j in self.joints:
            low, high = self.limits(j)
            data.qpos[model.jnt_qposadr[j]] = min(max(model.qpos0[model.jnt_qposadr[j]], low), high)
        mujoco.mj_kinematics(model, data)
        feet = self.given_feet(names) if names else self.inferred_feet()
        feet = {item: self.lowest(shapes) for item, shapes in feet.items()}
        turns = (model.jnt_type == _HINGE) & (np.abs(data.xaxis[:, 1]) > 0.7)  # about the y axis
        legs = [[j for j in self.above(self.body_of[shapes[0]]) if turns[j]] for shapes in feet.values()]
        shared = {j for one, two in itertools.combinations(legs, 2) for j in set(one) & set(two)}  # waist joints
        legs = [[j for j in leg if j not in shared] for leg in legs]
        if not stands:
            for leg, shapes in zip(legs, feet.values(), strict=True):
                self.bend(leg, shapes, BENT[len(feet) == 2])
        mujoco.mj_kinematics(model, data)
        height = float(data.xpos[self.root, 2]) - min(map(self.bottom, self.shapes))
        imus = [i for i in range(model.nsite) if "imu" in self.name("site", i).lower()]
        imus.sort(key=lambda i: model.site_bodyid[i])  # prefer an IMU on the root to one on the torso
        if not imus:
            self.notes.append("the file has no IMU site: placed one at the root's origin; adjust it in `sites`")
        upper = [i for i in self.bodies if TORSO.search(self.name("body", i))]
        return LeggedRobot(
            root=self.name("body", self.root),
            torso=self.name("body", (upper or self.bodies)[0]),
            imu=self.name("site", imus[0]) if imus else None,
            feet=[self.foot(item, shapes) for item, shapes in feet.items()],
            pose={self.name("joint", j): round(float(data.qpos[model.jnt_qposadr[j]]), 3) for j in self.joints},
            height=math.ceil(1000 * height) / 1000,
            motors=self.motors(height, [*feet.values()]),
            scales=self.scales,
            knees=[self.name("joint", leg[1]) for leg in legs if len(leg) > 1],
            pitches=[self.name("joint", j) for leg in legs for j in (*leg[:1], *leg[2:])],
            notes=self.notes,
        )

    def limits(self, joint: int) -> tuple[float, float]:
        """Return a joint's range [rad or m]; (-pi, pi) if it is unlimited."""
        low, high = self.model.jnt_range[joint] if self.model.jnt_limited[joint] else (-math.pi, math.pi)
        return float(low), float(high)

    def given_feet(self, names: Sequence[str]) -> dict[str, list[int]]:
        bodies = {self.name("body", i): i for i in self.bodies}
        geoms = {name: g for g in self.shapes if (name := self.name("geom", g))}
        feet = {}
        for name in names:
            if name not in bodies and name not in geoms:
                raise TaskError(f"no body or shape {name!r}", key="--feet", hint=available(name, [*bodies, *geoms]))
            shapes = self.shapes_of(bodies[name]) if name in bodies else [geoms[name]]
            if not shapes:
                raise TaskError(f"body {name!r} has no shape that can touch the ground", key="--feet")
            feet[f"{'body' if name in bodies else 'geom'}:{name}"] = shapes
        return feet

    def inferred_feet(self) -> dict[str, list[int]]:
        """Return the shapes of each foot by `Foot.item`: limb ends with a name such as foot, else the lowest ones."""
        model, weld = self.model, self.model.body_weldid
        inner = {weld[model.body_parentid[i]] for i in self.bodies if weld[model.body_parentid[i]] != weld[i]}
        ends: dict[int, list[int]] = {}  # shapes of each rigid group at the end of a limb
        for g in self.shapes:
            group = int(weld[self.body_of[g]])
            if group not in inner and group != weld[self.root]:
                ends.setdefault(group, []).append(g)
        names = {g: f"{self.name('body', self.body_of[g])} {self.name('geom', g)}" for g in self.shapes}
        matches = [[g for g in shapes if FOOT.search(names[g])] for shapes in ends.values()]
        matches = [shapes for shapes in matches if shapes]
        if len(matches) < 2:
            heights = {group: min(map(self.bottom, shapes)) for group, shapes in ends.items()}
            least = min(heights.values(), default=0.0)
            limit = least + LOW * (self.data.xpos[self.root, 2] - least)
            matches = [shapes for group, shapes in ends.items() if heights[group] <= limit]
        if len(matches) < 2:
            limbs = [self.name("body", group) for group in ends]
            problem = f"fewer than two of the limb ends {limbs} are near the ground or have a name like 'foot' or 'toe'"
            raise TaskError(f"cannot identify the feet: {problem}", hint="Try --feet left_foot,right_foot")
        feet = {}
        for shapes in matches:
            lowest = min(shapes, key=self.bottom)
            body, name = self.body_of[lowest], self.name("geom", lowest)
            alone = FOOT.search(self.name("body", body)) or not name or self.shapes_of(body) == [lowest]
            feet |= {f"body:{self.name('body', body)}": self.shapes_of(body)} if alone else {f"geom:{name}": [lowest]}
        return feet

    def shapes_of(self, body: int) -> list[int]:
        return [g for g in self.shapes if self.body_of[g] == body]

    def bottom(self, geom: int) -> float:
        """Return the height of a shape's lowest point [m]."""
        (radius, length, _), box = self.model.geom_size[geom], self.model.geom_aabb[geom]
        up = self.data.geom_xmat[geom].reshape(3, 3)[2]
        match self.model.geom_type[geom]:
            case _GEOM.mjGEOM_SPHERE.value:
                half = radius
            case _GEOM.mjGEOM_CAPSULE.value:
                half = radius + abs(up[2]) * length
            case _GEOM.mjGEOM_CYLINDER.value:
                half = radius * math.hypot(up[0], up[1]) + abs(up[2]) * length
            case _:
                half = np.abs(up) @ box[3:] - up @ box[:3]
        return float(self.data.geom_xpos[geom, 2]) - float(half)

    def lowest(self, shapes: list[int]) -> list[int]:
        """Return the shapes that touch the ground; a foot's link may also have shapes of the shank."""
        ground = min(map(self.bottom, shapes))
        return [shape for shape in shapes if self.bottom(shape) < ground + SOLE]

    def foot(self, item: str, shapes: list[int]) -> Foot:
        body = self.body_of[shapes[0]]
        middle = self.data.geom_xpos[shapes].mean(axis=0)
        middle[2] = min(map(self.bottom, shapes))
        place = self.data.xmat[body].reshape(3, 3).T @ (middle - self.data.xpos[body])
        x, y, _ = middle - self.data.xpos[self.root]
        sole = tuple(round(float(value), 4) + 0.0 for value in place)
        return Foot(item=item, body=self.name("body", body), sole=sole, place=(float(x), float(y)))

    def above(self, body: int) -> list[int]:
        """Return the joints that connect a body to the root, starting at the root."""
        chain = []
        while body != self.root:
            chain.append(body)
            body = int(self.model.body_parentid[body])
        return [j for j in self.joints if self.model.jnt_bodyid[j] in chain]

    def bend(self, leg: list[int], shapes: list[int], share: float) -> None:
        """Bend hip and knee so that the foot is below the hip, at `share` of the leg's maximum reach."""
        model, data = self.model, self.data
        if len(leg) < 2:
            return
        address = model.jnt_qposadr[leg]
        ranges = np.array([self.limits(j) for j in leg])
        signs, start = np.sign(data.xaxis[leg, 1]), data.qpos[address].copy()

        def level(hip: float, knee: float) -> np.ndarray:
            """Return the leg's joint angles [rad]; the joint below the knee keeps the foot level."""
            angles = np.array([hip, knee, *start[2:]])
            if len(leg) > 2:
                turned = signs[:2] @ (angles[:2] - start[:2])
                angles[2] = np.clip(start[2] - signs[2] * turned, *ranges[2])
            return angles

        def place(angles: tuple[float, float]) -> tuple[float, float]:
            """Return the foot's position ahead of and below the hip [m]."""
            data.qpos[address] = level(*angles)
            mujoco.mj_kinematics(model, data)
            x, _, z = data.geom_xpos[shapes].mean(axis=0) - data.xanchor[leg[0]]
            return float(x), -float(z)

        grid = [np.linspace(low, high, 31) for low, high in ranges[:2]]
        reach = max(place(angles)[1] for angles in itertools.product(*grid))

        def cost(angles: tuple[float, float]) -> float:
            x, z = place(angles)
            return x**2 + (z - share * reach) ** 2 + 1e-4 * reach**2 * float(np.square(angles).sum())

        best = min(itertools.product(*grid), key=cost)
        for _ in range(2):
            grid = [
                np.clip(np.linspace(angle - near[1] + near[0], angle + near[1] - near[0], 11), near.min(), near.max())
                for angle, near in zip(best, grid, strict=True)
            ]
            best = min(itertools.product(*grid), key=cost)
        data.qpos[address] = np.clip(np.round(level(*best), 2), *ranges.T)

    def motors(self, height: float, feet: list[list[int]]) -> dict[str, tuple[float, float]]:
        """Return the armature [kg m^2] and maximum torque [N m] of each joint; add notes on guessed values."""
        model, data, motors = self.model, self.data, {}
        legs, loads = [self.above(self.body_of[shapes[0]]) for shapes in feet], self.loads(feet)
        heaviest: dict[float, float] = {}  # maximum load [N m] of the joints with the same maximum torque
        gravity = float(np.linalg.norm(model.opt.gravity))
        standing = 0.5 * float(model.body_subtreemass[self.root]) * gravity * height
        unknown = without = 0
        for j in self.joints:
            effort = self.effort(j)
            if effort is None:
                body, unknown = model.jnt_bodyid[j], unknown + 1
                lever = float(np.linalg.norm(data.subtree_com[body] - data.xanchor[j]))
                hangs = max(5.0 * float(model.body_subtreemass[body]) * gravity * lever, 0.05 * standing)
                guess = standing if any(j in leg for leg in legs) else min(hangs, standing)
                effort = float(f"{guess:.2g}")
            motors[j] = float(model.dof_armature[model.jnt_dofadr[j]]), effort
            heaviest[effort] = max(heaviest.get(effort, 0.0), loads[j])
        for j, (armature, effort) in motors.items():
            if armature == 0.0:
                stiff = heaviest[effort] / (SAG * (2.0 * math.pi * SERVO_HZ) ** 2)
                motors[j], without = (max(ARMATURE * effort, stiff), effort), without + 1
                if stiff > ARMATURE * effort:  # the default action scale would hardly move the joint
                    self.scales[self.name("joint", j)] = SCALE
        if unknown:
            self.notes.append(f"{unknown} joints have no maximum torque in the file: estimated from their loads")
        if without:
            guess = f"{ARMATURE:g} x maximum torque, or more to limit the servo's sag to {SAG:g} rad"
            self.notes.append(f"{without} joints have no armature in the file: set to {guess}")
        return {self.name("joint", j): tuple(float(f"{x:.4g}") for x in motor) for j, motor in motors.items()}  # type: ignore[misc]

    def loads(self, feet: list[list[int]]) -> dict[int, float]:
        """Return the absolute joint torques [N m] that hold the pose with the weight shared equally among the feet."""
        model, data = self.model, self.data
        mujoco.mj_forward(model, data)
        torque, jacobian = data.qfrc_bias.copy(), np.zeros((3, model.nv))
        weight = float(model.body_subtreemass[self.root]) * -model.opt.gravity / len(feet)
        for shapes in feet:
            mujoco.mj_jac(model, data, jacobian, None, data.geom_xpos[shapes].mean(axis=0), self.body_of[shapes[0]])
            torque -= jacobian.T @ weight
        return {j: abs(float(torque[model.jnt_dofadr[j]])) for j in self.joints}

    def effort(self, joint: int) -> float | None:
        """Return a joint's maximum torque [N m]: the actuator's limit, else the joint's; None if there is neither."""
        model = self.model
        for a in range(model.nactuator):
            if model.actuator_trntype[a] != _JOINT or model.actuator_trnid[a, 0] != joint:
                continue
            gear = abs(float(model.actuator_gear[a, 0]))
            if model.actuator_forcelimited[a]:
                return gear * float(np.abs(model.actuator_forcerange[a]).max())
            control = model.actuator_ctrladr[a]
            if model.actuator_biastype[a] == _NONE and model.actuator_ctrllimited[control]:
                return gear * float(np.abs(model.actuator_ctrlrange[control] * model.actuator_gainprm[a, 0]).max())
        return float(np.abs(model.jnt_actfrcrange[joint]).max()) if model.jnt_actfrclimited[joint] else None
