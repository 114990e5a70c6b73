"""Joint orders of robot vendors, and their application to exported policies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mujoco

from gpusim_rl.env import Environment, VecEnv
from gpusim_rl.errors import ConfigError
from gpusim_rl.export.controls import ControlMap
from gpusim_rl.sim.actuators import control_names

_HINGE, _SLIDE = mujoco.mjtJoint.mjJNT_HINGE.value, mujoco.mjtJoint.mjJNT_SLIDE.value
_LEGS = ("hip_pitch", "hip_roll", "hip_yaw", "knee", "ankle_pitch", "ankle_roll")
_ARMS = ("shoulder_pitch", "shoulder_roll", "shoulder_yaw", "elbow", "wrist_roll", "wrist_pitch", "wrist_yaw")
ORDERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "unitree": (  # LowState.motor_state and LowCmd.motor_cmd of unitree_sdk2: Go1, Go2 and B2; G1
        tuple(f"{leg}_{part}" for leg in ("FR", "FL", "RR", "RL") for part in ("hip", "thigh", "calf")),
        (
            *(f"{side}_{part}" for side in ("left", "right") for part in _LEGS),
            *("waist_yaw", "waist_roll", "waist_pitch"),
            *(f"{side}_{part}" for side in ("left", "right") for part in _ARMS),
        ),
    )
}
"""Joint names without `_joint` in each vendor's order, one tuple per robot family."""


@dataclass(frozen=True)
class JointOrder:
    """Vendor's joint order: scene indices of joints and actuators, task indices of actions and observation columns."""

    vendor: str
    joints: tuple[int, ...]
    actuators: tuple[int, ...]
    actions: tuple[int, ...]
    obs: tuple[int, ...]

    def control(self, control: ControlMap) -> ControlMap:
        """Return the action map with actions and controls in this order."""
        offset, scale = (tuple(values[i] for i in self.actuators) for values in (control.offset, control.scale))
        source = tuple(self.actions.index(control.source[i]) for i in self.actuators)
        return replace(control, offset=offset, scale=scale, source=source)


def joint_order(vendor: str, env: Environment, control: ControlMap | None) -> JointOrder:
    """Return a vendor's order for a task's policy; raise ConfigError if joints, actions or observations do not fit."""
    key, hint = f"--order {vendor}", "Try without --order"
    if not isinstance(env, VecEnv):
        raise ConfigError("not supported for third-party envs", key=key, hint=hint)
    model, sources = env.sim.scene.model, env.task.sources
    joints = [j for j in range(model.njnt) if model.jnt_type[j] in (_HINGE, _SLIDE)]
    names = [model.joint(j).name.rpartition("/")[2].removesuffix("_joint") for j in joints]
    known = max(ORDERS[vendor], key=lambda order: len(set(order) & set(names)))
    if sorted(known) != sorted(names):
        unknown, lacking = ([n for n in one if n not in two] for one, two in ((names, known), (known, names)))
        problem = f"{vendor} has no joint like {unknown[:3]}" if unknown else f"the robot lacks joints {lacking[:3]}"
        raise ConfigError(problem, key=key, hint=f"{hint}, and look up joints by name in policy.json")
    on_joint = model.actuator_trntype == mujoco.mjtTrn.mjTRN_JOINT
    driven = [int(model.actuator_trnid[a, 0]) if on_joint[a] else -1 for _, a in control_names(model)]
    terms = env.obs_terms.get("policy", ())
    if unknown := [term.name for term in terms if term.name not in sources] or not terms:
        raise ConfigError(f"the task does not declare the `sources` of {unknown or 'its observations'}", key=key)
    columns = () if control is None else control.source
    if control is None or sorted(driven) != joints or sorted(columns) != [*range(len(joints))]:
        raise ConfigError("the task does not have one action per joint", key=key, hint=hint)
    order = [names.index(name) for name in known]
    actuators = [driven.index(joints[i]) for i in order]
    actions = [columns[a] for a in actuators]
    obs = list[int]()
    for term in terms:
        per_joint = sources[term.name].removeprefix("clip ").startswith(("joint positions", "joint velocities"))
        frame = order if per_joint else actions if sources[term.name] == "last action" else range(term.size)
        for _ in range(term.history):
            first = len(obs)
            obs += [first + i for i in frame]
    return JointOrder(vendor, tuple(order), tuple(actuators), tuple(actions), tuple(obs))
