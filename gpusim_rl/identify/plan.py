"""Excitation of all joints at once, simulated before a robot plays it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np

from gpusim_rl.errors import ConfigError
from gpusim_rl.identify.log import Array, Log
from gpusim_rl.identify.rig import Rig
from gpusim_rl.sim import Scene

SINES, BAND_HZ = 6, (0.2, 8.0)  # per joint
AMPLITUDE, SLOPE = 0.35, 0.3  # of the slowest sine [rad]; exponent of the decay with frequency
FADE_S, REST_S = 1.0, 0.25  # fade in and out; rest at both ends [s]
MARGIN, SHARE = 0.05, 0.6  # distance from joint limits [rad]; share of the effort limit
SMALLER, TRIES = 0.8, 24
CHANGES = (0.5, 1.0, 1.5)  # factors of all parameters of the simulated drives


@dataclass(frozen=True)
class Plan:
    """Targets for a robot, with what they did to its simulations."""

    joints: list[str]
    time: Array
    target: Array
    stance: Array
    amplitude: Array  # largest distance of the targets from the stance [rad]
    effort: Array  # largest share of the effort limit
    margin: Array  # least distance of readings from joint limits [rad]
    stiffness: Array
    damping: Array

    def arrays(self) -> dict[str, Any]:
        """Return the content of the npz file."""
        gains = {"kp": self.stiffness, "kd": self.damping}
        return {"time": self.time, "target": self.target, "joint_names": np.array(self.joints), **gains}


def excitation(stance: Array, seconds: float, hz: float, scale: Array, seed: int) -> tuple[Array, Array]:
    """Return times and targets: sines with random phases around a stance, which fade in and out."""
    rng, time = np.random.default_rng(seed), np.arange(round(seconds * hz)) / hz
    edges = np.geomspace(*BAND_HZ, SINES + 1)
    hertz = rng.uniform(edges[:-1, None], edges[1:, None], (SINES, len(stance)))
    size = AMPLITUDE * (BAND_HZ[0] / hertz) ** SLOPE
    phase = rng.uniform(0.0, 2.0 * np.pi, hertz.shape)
    waves = (size * np.sin(2.0 * np.pi * hertz * time[:, None, None] + phase)).sum(axis=1)
    fade = np.clip((np.minimum(time, time[-1] - time) - REST_S) / FADE_S, 0.0, 1.0)
    return time, stance + scale * (0.5 - 0.5 * np.cos(np.pi * fade))[:, None] * waves


def make_plan(scene: Scene, stance: Mapping[str, float], seconds: float, hz: float, seed: int = 0) -> Plan:
    """Return targets that keep a robot within limits and efforts, and off itself, whatever its drives.

    Raises:
        ConfigError: Not even small targets do.
    """
    rig = Rig(scene, fit=("armature", "damping", "friction", "gains", "delay"))
    joints, scale, own = len(rig.joints), np.ones(len(rig.joints)), _own_contacts(scene, rig, stance)
    low, high = rig.range[:, 0] + 3.0 * MARGIN, rig.range[:, 1] - 3.0 * MARGIN
    middle = np.clip([stance.get(joint, 0.0) for joint in rig.joints], low, high)
    attempts = itertools.count()
    while True:
        time, target = excitation(middle, seconds, hz, scale, seed)
        log = Log("plan", rig.joints, time, target, np.tile(middle, (len(time), 1)))
        whole, xs = slice(0, len(time)), np.stack([_changed(rig, factor) for factor in CHANGES])
        q, v = rig.simulate(log, whole, xs)
        efforts = np.stack([np.abs(rig.efforts(log, *each)) for each in zip(q, v, xs, strict=True)])
        effort = efforts.max(axis=(0, 1)) / rig.effort
        reach = np.concatenate([q.reshape(-1, joints), target])
        margin = np.minimum(reach.min(axis=0) - rig.range[:, 0], rig.range[:, 1] - reach.max(axis=0))
        touching = _contacts(scene, rig, q[1], own)
        bad = (effort > SHARE) | (margin < MARGIN) | touching
        if not bad.any():
            gains = np.array([[rig.nominal[joint]["stiffness"] for joint in rig.joints], rig.servo_damping])
            amplitude = np.abs(target - middle).max(axis=0)
            return Plan(rig.joints, time, target, middle, amplitude, effort, margin, *gains)
        if next(attempts) == TRIES:
            i = int(bad.argmax())
            why = f"effort {effort[i]:.0%} of the limit, {margin[i]:.2g} rad from the joint's, contact: {touching[i]}"
            raise ConfigError(f"no safe targets for {rig.joints[i]}: {why}", key="--plan", hint="Try another stance")
        scale = np.where(bad, SMALLER * scale, scale)


def _changed(rig: Rig, factor: float) -> Array:
    """Return the nominal parameters, with all physical values of the drives but the delay times a factor."""
    shift = [np.log(factor) if p.log else (factor - 1.0) * p.start * (p.kind == "friction") for p in rig.parameters]
    return rig.start + np.array(shift)


def _touching(scene: Scene, rig: Rig, pose: Array, data: mujoco.MjData) -> dict[tuple[int, int], set[int]]:
    """Return joints that carry the bodies of each pair of touching geoms of the robot, high above the ground."""
    model, columns = scene.model, [scene.elements_of(rig.robot, "joint")[joint] for joint in rig.joints]
    data.qpos[:] = model.qpos0
    for j in np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE):
        data.qpos[model.jnt_qposadr[j] + 2] += 100.0
    data.qpos[model.jnt_qposadr[columns]] = pose
    mujoco.mj_kinematics(model, data)
    mujoco.mj_comPos(model, data)
    mujoco.mj_collision(model, data)
    found = {}
    for contact in data.contact[: data.ncon]:
        pair, carriers = (int(contact.geom[0]), int(contact.geom[1])), set[int]()
        for geom in pair:
            body = int(model.geom_bodyid[geom])
            while body:
                carriers |= {i for i, j in enumerate(columns) if model.jnt_bodyid[j] == body}
                body = int(model.body_parentid[body])
        if contact.dist < 0.0:
            found[pair] = carriers
    return found


def _own_contacts(scene: Scene, rig: Rig, stance: Mapping[str, float]) -> set[tuple[int, int]]:
    pose = np.array([stance.get(joint, 0.0) for joint in rig.joints])
    return {*_touching(scene, rig, pose, mujoco.MjData(scene.model))}


def _contacts(scene: Scene, rig: Rig, readings: Array, own: set[tuple[int, int]]) -> Any:
    """Return the mask of joints that bring parts of the robot into contact, except for contacts in the stance."""
    data, mask = mujoco.MjData(scene.model), np.zeros(len(rig.joints), bool)
    for pose in readings[:: max(1, len(readings) // 200)]:
        for pair, carriers in _touching(scene, rig, pose, data).items():
            if pair not in own:
                mask[list(carriers)] = True
    return mask
