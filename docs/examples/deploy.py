"""Run an exported policy of Ant in plain MuJoCo: no torch, no gpusim_rl.

python tools/export.py Ant
python docs/examples/deploy.py runs/Ant/latest/export --episodes 100

It reads the files that tools/export.py wrote. Observation and reward are those of tasks/ant.py, one env, in numpy.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import onnxruntime

FEET = ("front_left_foot", "front_right_foot", "back_left_foot", "back_right_foot")
TARGET = np.array([1000.0, 0.0])  # m


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="what tools/export.py wrote")
    parser.add_argument("--episodes", type=int, default=100, help="whole episodes (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the starts (default: 0)")
    return parser.parse_args(argv)


class Policy:
    """An exported policy: raw observation to controls, with its recurrent state if it has one."""

    def __init__(self, folder: Path, card: dict[str, Any]) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # such a small network is slower on more
        self.session = onnxruntime.InferenceSession(folder / card["files"]["onnx"], options)
        self.states = card["recurrent_state"]
        self.reset()

    def reset(self) -> None:
        """An episode begins: the state is zero."""
        self.state = {}
        for state in self.states:
            shape = [1 if size == "batch" else size for size in state["shape"]]
            self.state[state["input"]] = np.zeros(shape, dtype=np.float32)

    def act(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Action, which an observation may show, and controls of the actuators."""
        action, control, *states = self.session.run(None, {"obs": obs[None].astype(np.float32), **self.state})
        self.state = dict(zip(self.state, states, strict=True))
        return action[0], control[0]


class Ant:
    """One ant: tasks/ant.py and tasks/locomotion.py in numpy.

    Args:
        folder: What tools/export.py wrote.
        card: Its policy.json.
        seed: Of the starts.
    """

    def __init__(self, folder: Path, card: dict[str, Any], seed: int) -> None:
        self.card, self.cfg = card, card["settings"]
        self.parts = card["observation"]["parts"]
        self.model = load_scene(folder, card)
        self.data = mujoco.MjData(self.model)
        self.random = np.random.default_rng(seed)
        self.dt = 1.0 / card["control_hz"]
        self.substeps = round(card["physics_hz"] / card["control_hz"])
        joints = card["joints"]
        self.qpos = [joint["qpos"] for joint in joints]
        self.qvel = [joint["qvel"] for joint in joints]
        self.low, self.high = np.array([joint["range"] for joint in joints]).T
        self.middle, self.half = (self.low + self.high) / 2, (self.high - self.low) / 2
        self.start = np.clip([joint["default"] for joint in joints], self.low, self.high)
        self.action = np.zeros(card["action"]["size"])
        self.progress, self.potential = 0, 0.0

    def reset(self) -> np.ndarray:
        """A new episode; returns its first observation."""
        data, joints = self.data, len(self.qpos)
        mujoco.mj_resetData(self.model, data)  # sensors read zero until the first step
        noise = self.random.uniform(-1.0, 1.0, (2, joints))
        data.qpos[self.qpos] = np.clip(self.start + 0.2 * noise[0], self.low, self.high)
        data.qvel[self.qvel] = 0.1 * noise[1]
        self.action = np.zeros_like(self.action)
        self.progress, self.potential = 0, self._potential()
        return self.observe()

    def step(self, action: np.ndarray, control: np.ndarray) -> tuple[np.ndarray, float, bool]:
        """One control step.

        Returns:
            The observation after it, its reward, and whether the episode ended.
        """
        self.action = action.astype(float)
        self.data.ctrl[:] = control
        mujoco.mj_step(self.model, self.data, self.substeps)
        speed, limit = np.linalg.norm(self.data.qvel[3:6]), self.card["max_angular_velocity"]
        if limit is not None and speed > limit:  # what no MuJoCo model holds, and Ant's scene has
            self.data.qvel[3:6] *= limit / speed
        self.progress += 1
        fell = self.data.qpos[2] < self.cfg["termination_height"]
        reward = self._reward(fell)
        return self.observe(), reward, bool(fell or self.progress >= self.card["episode_length"])

    def observe(self) -> np.ndarray:
        """The observation, [60]."""
        data = self.data
        forward, left, up = axes = self._axes()
        way = TARGET - data.qpos[:2]
        ahead, aside = forward[:2] @ way, forward[0] * way[1] - forward[1] * way[0]
        parts = {
            "height": data.qpos[2:3],
            "lin_vel": axes @ data.qvel[:3],
            "ang_vel": data.qvel[3:6],  # of a free joint MuJoCo has the angular velocity in the body's frame
            "angles": [np.arctan2(forward[1], forward[0]), np.arctan2(left[2], up[2]), np.arctan2(aside, ahead)],
            "directions": [up[2], ahead / np.linalg.norm(way)],
            "joint_pos": (data.qpos[self.qpos] - self.middle) / self.half,
            "joint_vel": data.qvel[self.qvel],
            "foot_wrench": np.concatenate([self._contact(foot) for foot in FEET]),
            "actions": self.action,
        }
        # In the order and with the scales of the card.
        return np.concatenate([np.multiply(parts[part["name"]], part["scale"]) for part in self.parts])

    def _contact(self, foot: str) -> np.ndarray:
        """Contact force and torque about the foot's origin in its frame, [6]; sensors are of the last physics step."""
        sensors = [f"ant/{foot}/{name}" for name in ("contact", "contact_pos", "contact_quat")]
        wrench, origin, quat = (self.data.sensor(name).data for name in sensors)
        force, torque, point = wrench[:3], wrench[3:6], wrench[6:9]
        rotation = np.zeros(9)
        mujoco.mju_quat2Mat(rotation, quat)
        torque = torque + np.cross(point - origin, force)
        return np.concatenate([force @ rotation.reshape(3, 3), torque @ rotation.reshape(3, 3)])

    def _reward(self, fell: bool) -> float:
        cfg = self.cfg
        before, self.potential = self.potential, self._potential()
        if fell:
            return cfg["death_cost"]
        forward, _, up = self._axes()
        way = TARGET - self.data.qpos[:2]
        heading = forward[:2] @ way / np.linalg.norm(way)
        joint_pos, joint_vel = self.data.qpos[self.qpos], self.data.qvel[self.qvel]
        energy = np.abs(self.action * joint_vel).sum() * cfg["joint_vel_scale"]
        at_limit = (joint_pos > self.middle + 0.99 * self.half).sum()
        return float(
            self.potential
            - before
            + cfg["alive_reward"]
            + cfg["up_weight"] * (up[2] > 0.93)
            + cfg["heading_weight"] * min(heading / 0.8, 1.0)
            - cfg["action_cost"] * np.square(self.action).sum()
            - cfg["energy_cost"] * energy
            - cfg["joint_limit_cost"] * at_limit
        )

    def _potential(self) -> float:
        """Minus the distance to the target per control step [m/s]."""
        return -float(np.linalg.norm(TARGET - self.data.qpos[:2])) / self.dt

    def _axes(self) -> np.ndarray:
        """The torso's axes in the world frame, as rows: forward, left, up."""
        rotation = np.zeros(9)
        mujoco.mju_quat2Mat(rotation, self.data.qpos[3:7])
        return rotation.reshape(3, 3).T


def load_scene(folder: Path, card: dict[str, Any]) -> mujoco.MjModel:
    """The model itself, where this is the MuJoCo that wrote it; else its XML, which has six digits."""
    if card["versions"]["mujoco"] == mujoco.__version__:
        return mujoco.MjModel.from_binary_path(str(folder / card["files"]["scene"]))
    model = mujoco.MjModel.from_xml_path(str(folder / card["files"]["scene_xml"]))
    model.opt.timestep = 1.0 / card["physics_hz"]
    return model


def main(argv: list[str] | None = None) -> None:
    """Play whole episodes; print their mean return."""
    args = parse(argv)
    card = json.loads((args.folder / "policy.json").read_text())
    if card["task"] != "Ant":
        raise SystemExit(f"this example knows Ant only, and {args.folder} is of {card['task']}")
    policy, env = Policy(args.folder, card), Ant(args.folder, card, args.seed)
    returns = []
    for _ in range(args.episodes):
        policy.reset()
        obs, total, done = env.reset(), 0.0, False
        while not done:
            obs, reward, done = env.step(*policy.act(obs))
            total += reward
        returns.append(total)
    error = np.std(returns) / np.sqrt(len(returns))
    print(f"return {np.mean(returns):.1f} +- {error:.1f} (standard error of {len(returns)} episodes)")


if __name__ == "__main__":
    main()
