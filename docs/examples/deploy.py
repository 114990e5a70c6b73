"""Run an exported policy in plain MuJoCo: no torch, no gpusim_rl.

gpusim-rl export Go1Velocity
python docs/examples/deploy.py runs/Go1Velocity/latest/export --command 0.5 0 0
python docs/examples/deploy.py runs/Go1Velocity/latest/export --square 1.0

The script has no robot- or task-specific code: `policy.json` has joints, rates and the source of each observation term.
On a robot, `Robot` reads encoders and IMU instead of MuJoCo; the rest stays the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import mujoco
import numpy as np


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder written by `gpusim-rl export`")
    parser.add_argument("--seconds", type=positive, help="simulated time [s] (default: 10)")
    parser.add_argument("--command", type=finite, nargs="+", help="in policy.json order: x, y [m/s], yaw [rad/s]")
    parser.add_argument("--square", type=positive, metavar="SIDE", help="walk a square with sides of SIDE [m]")
    parser.add_argument("--out", type=Path, help="output video (.mp4); needs imageio-ffmpeg")
    args = parser.parse_args(argv)
    if args.square and (args.command or args.seconds):
        parser.error("--square sets commands and time itself: remove --command and --seconds")
    return args


def finite(text: str) -> float:
    """Parse a finite number."""
    value = float(text)
    if not np.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be finite, got {text}")
    return value


def positive(text: str) -> float:
    """Parse a positive number."""
    value = finite(text)
    if value <= 0.0:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


class Robot:
    """MuJoCo simulation of the exported scene.

    Args:
        folder: Folder written by `gpusim-rl export`.
        card: Content of policy.json.
    """

    def __init__(self, folder: Path, card: dict[str, Any]) -> None:
        self.card, self.terms = card, card["observation"].get("terms", [])
        self.model = mujoco.MjModel.from_xml_path(str(folder / card["files"]["scene"]))
        self.model.opt.timestep = 1.0 / card["physics_hz"]
        self.data = mujoco.MjData(self.model)
        self.substeps = round(card["physics_hz"] / card["control_hz"])
        if not (1.0 <= card["control_hz"] <= 2000.0 and 1 <= self.substeps <= 1000):
            raise ValueError(f"{card['control_hz']} control steps per second, of {self.substeps} physics steps")
        self.most_spin = float(card.get("max_angular_velocity") or 0.0)  # not part of a MuJoCo model
        self.joints = {joint["name"]: (joint["qpos"], joint["qvel"]) for joint in card["joints"]}
        self.qpos, self.qvel = np.array(list(self.joints.values())).T
        self.bias = np.array([joint.get("encoder_bias", 0.0) for joint in card["joints"]])  # reading - angle
        self.biases = dict(zip(self.joints, self.bias, strict=True))
        self.pose = np.array([joint.get("pose", joint["default"]) for joint in card["joints"]])
        free = self.model.jnt_type == mujoco.mjtJoint.mjJNT_FREE
        robot = np.bincount(self.model.body_rootid[self.model.dof_bodyid], minlength=1).argmax()  # most joints
        floating = np.flatnonzero(free & (self.model.jnt_bodyid == robot))
        self.base = int(floating[0]) if len(floating) else None
        self.controls = {  # columns of data.ctrl
            name: self.column(actuator["name"])
            for actuator in card["actuators"]
            for name in (actuator["name"], actuator.get("joint"))
        }
        self.command = dict.fromkeys(card["commands"], 0.0)
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:], self.data.qvel[:] = card["start"]["qpos"], card["start"]["qvel"]
        mujoco.mj_forward(self.model, self.data)  # sensors
        wrong = []
        for term in self.terms:
            value = self.read(term["source"])
            if value is None or np.size(value) != term["size"]:
                wrong.append(term["name"])
        if wrong or not self.terms:
            raise SystemExit(f"{card['task']}: only the task can compute {', '.join(wrong) or 'its observations'}")

    def column(self, control: str) -> int:
        """Return the data.ctrl index of a control: `a` for an actuator, or `a/1` if actuator `a` has several."""
        kind, (name, _, number) = mujoco.mjtObj.mjOBJ_ACTUATOR, control.rpartition("/")
        if (actuator := mujoco.mj_name2id(self.model, kind, control)) >= 0:
            number = 0
        else:
            actuator = self.model.actuator(name).id
        first = getattr(self.model, "actuator_ctrladr", np.arange(self.model.nu))  # one per actuator before MuJoCo 4
        return int(first[actuator]) + int(number)

    def read(self, source: str) -> Any:
        """Return the current value of an observation source, or None if only the task can compute it."""
        data = self.data
        match source.split():
            case ["sensor", name]:
                return data.sensor(name).data
            case ["joint", "positions"]:
                return data.qpos[self.qpos] + self.bias
            case ["joint", "positions", "from", "the", "pose"]:
                return data.qpos[self.qpos] + self.bias - self.pose
            case ["joint", "velocities"]:
                return data.qvel[self.qvel]
            case ["velocity", "of", joint] if joint in self.joints:
                return data.qvel[self.joints[joint][1]]
            case ["position" | "sine" | "cosine" as what, "of", joint] if joint in self.joints:
                angle = data.qpos[self.joints[joint][0]]
                return {"position": angle + self.biases[joint], "sine": np.sin(angle), "cosine": np.cos(angle)}[what]
            case ["gravity"] if self.base is not None:
                return -self.axes()[2]
            case ["base", "velocity"] if self.base is not None:
                return self.axes().T @ data.qvel[self.dof : self.dof + 3]
            case ["base", "angular", "velocity"] if self.base is not None:
                return data.qvel[self.dof + 3 : self.dof + 6]  # MuJoCo stores it in the body frame
            case ["last", "action"]:
                return np.zeros(self.card["action"]["size"])  # DeployedPolicy fills it in
            case ["command", *names] if set(names) <= set(self.command):
                return [self.command[name] for name in names]
            case ["phase", "sine" | "cosine" as wave, period, offset, *standing]:  # standing: value at command 0
                if standing and np.linalg.norm([*self.command.values()]) < 1e-3:
                    return float(standing[-1])
                return {"sine": np.sin, "cosine": np.cos}[wave](2 * np.pi * data.time / float(period) + float(offset))
        return None

    def observe(self) -> dict[str, Any]:
        """Return all observation terms except the last action, unscaled."""
        return {term["name"]: self.read(term["source"]) for term in self.terms if term["source"] != "last action"}

    def step(self, targets: dict[str, float]) -> None:
        """Take one control step."""
        for name, value in targets.items():
            self.data.ctrl[self.controls[name]] = value - self.biases.get(name, 0.0)
        mujoco.mj_step(self.model, self.data, self.substeps)
        free = self.model.jnt_type == mujoco.mjtJoint.mjJNT_FREE
        for first in self.model.jnt_dofadr[free] if self.most_spin else []:
            spin = self.data.qvel[first + 3 : first + 6]
            spin *= min(1.0, self.most_spin / max(float(np.linalg.norm(spin)), 1e-9))
        mujoco.mj_forward(self.model, self.data)  # after mj_step, sensors still have the state before it

    @property
    def dof(self) -> int:
        """Index of the base's velocity in qvel."""
        return int(self.model.jnt_dofadr[self.base])

    def axes(self) -> np.ndarray:
        """Return the axes of the base in the world frame, as columns: forward, left, up."""
        rotation, first = np.zeros(9), self.model.jnt_qposadr[self.base]
        mujoco.mju_quat2Mat(rotation, self.data.qpos[first + 3 : first + 7])
        return rotation.reshape(3, 3)

    def fell(self) -> bool:
        """Return whether the base is tilted by more than 60 degrees."""
        return self.base is not None and bool(self.axes()[2, 2] < 0.5)

    def place(self) -> np.ndarray:
        """Return the x, y position of the base [m]."""
        first = self.model.jnt_qposadr[self.base]
        return self.data.qpos[first : first + 2].copy()


class Video:
    """Video recorder (mp4, 30 frames per second); no-op without a file."""

    def __init__(self, file: Path | None, robot: Robot) -> None:
        self.robot, self.writer, self.next = robot, None, 0.0
        if file is None:
            return
        try:
            import imageio_ffmpeg
        except ImportError:
            raise SystemExit("--out: needs imageio-ffmpeg; try pip install imageio-ffmpeg") from None
        try:
            self.renderer = mujoco.Renderer(robot.model, 480, 640)
        except (mujoco.FatalError, RuntimeError) as error:
            raise SystemExit(f"--out: no OpenGL ({error}); try MUJOCO_GL=egl or MUJOCO_GL=osmesa") from None
        self.camera = mujoco.MjvCamera()
        mujoco.mjv_defaultFreeCamera(robot.model, self.camera)
        self.renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False  # lights do not follow the robot
        self.writer = imageio_ffmpeg.write_frames(str(file), (640, 480), fps=30)
        self.writer.send(None)

    def frame(self) -> None:
        """Render and write a frame if one is due."""
        if self.writer is None or self.robot.data.time < self.next:
            return
        self.next += 1.0 / 30.0
        if self.robot.base is not None:
            self.camera.lookat[:2], self.camera.distance, self.camera.elevation = self.robot.place(), 2.0, -20.0
        self.renderer.update_scene(self.robot.data, self.camera)
        self.writer.send(np.ascontiguousarray(self.renderer.render()))

    def close(self) -> None:
        """Finish the file."""
        if self.writer is not None:
            self.writer.close()


def load_policy(folder: Path) -> Any:
    """Load the policy, using the `policy.py` exported with it."""
    spec = importlib.util.spec_from_file_location("exported_policy", folder / "policy.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DeployedPolicy(folder)


def legs_of(args: argparse.Namespace, ranges: dict[str, Any]) -> list[tuple[float, dict[str, float]]]:
    """Return each leg of the walk: duration [s] and command."""
    if args.square is not None:
        if not {"x", "y"} <= set(ranges):
            raise SystemExit(f"--square needs commands x and y, but the policy takes {list(ranges) or 'none'}")
        speed = min(0.5, *(abs(limit) for name in "xy" for limit in ranges[name] or (0.5,))) or 0.5
        ways = ({"x": speed}, {"y": speed}, {"x": -speed}, {"y": -speed})
        return [(args.square / speed, {name: way.get(name, 0.0) for name in ranges}) for way in ways]
    values = args.command or [0.0] * len(ranges)
    if len(values) != len(ranges):
        raise SystemExit(f"--command: the policy takes {list(ranges) or 'none'}, got {len(values)} numbers")
    return [(args.seconds or 10.0, dict(zip(ranges, values, strict=True)))]


def outside(command: dict[str, float], ranges: dict[str, Any]) -> list[str]:
    """Return a warning for each command outside its training range, if that range is known."""
    return [
        f"command {name} {value:g} is outside the trained range [{low:g}, {high:g}]"
        for name, value in command.items()
        for low, high in [ranges[name] or (value, value)]
        if any(command.values()) and not low - 1e-6 <= value <= high + 1e-6
    ]


def run(robot: Robot, policy: Any, video: Video, seconds: float) -> np.ndarray:
    """Run for `seconds` or until a fall; return base-frame x, y velocity [m/s] and yaw rate [rad/s], [steps, 3]."""
    moved = []
    for _ in range(max(1, round(seconds * robot.card["control_hz"]))):
        _, targets = policy.act(robot.observe())
        robot.step(targets)
        video.frame()
        if robot.base is not None:
            moved.append([*robot.read("base velocity")[:2], robot.read("base angular velocity")[2]])
            if robot.fell():
                break
    return np.array(moved)


def main(argv: list[str] | None = None) -> None:
    """Run the policy and print how it performs."""
    args = parse(argv)
    if not (args.folder / "policy.json").is_file():
        raise SystemExit(f"{args.folder} has no policy.json. Try gpusim-rl export, which writes <run>/export")
    try:
        policy = load_policy(args.folder)
        card = policy.card
        if not card.get("control"):
            raise SystemExit(f"{card.get('task')}: policy.json has no controls: only the task can apply actions")
        legs = legs_of(args, card["commands"])
        warnings = dict.fromkeys(line for _, command in legs for line in outside(command, card["commands"]))
        robot = Robot(args.folder, card)
        policy.act(robot.observe())
        policy.reset()
    except Exception as error:  # classes of MuJoCo and onnxruntime have no common base
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise SystemExit(f"{args.folder}: damaged export: {text}") from None
    print(*warnings, sep="\n", end="\n" * bool(warnings))
    video = Video(args.out, robot)
    walks = robot.base is not None and {"x", "y"} <= set(card["commands"])
    corner, frame = (robot.place(), robot.axes()[:2, :2]) if walks else (np.zeros(2), np.eye(2))
    for seconds, robot.command in legs:
        moved = run(robot, policy, video, seconds)
        line = f"{seconds:g} s, command {robot.command or 'none'}"
        if walks:
            wanted = np.array([robot.command["x"], robot.command["y"]])
            error = np.linalg.norm(moved[:, :2] - wanted, axis=1).mean()
            line += f": mean velocity {np.round(moved.mean(axis=0), 2).tolist()}, mean error {error:.2f} m/s"
            if "yaw" in robot.command:
                line += f", {np.abs(moved[:, 2] - robot.command['yaw']).mean():.2f} rad/s"
            corner = corner + seconds * frame @ wanted
            if args.square is not None:
                line += f", {np.linalg.norm(robot.place() - corner):.2f} m from the corner"
        print(line)
        if robot.fell():
            print(f"robot fell after {robot.data.time:.1f} s")
            break
    video.close()
    print(f"joints at the end: {np.round(robot.data.qpos[robot.qpos], 3).tolist()}")


if __name__ == "__main__":
    try:
        main()
    except SystemExit as ended:
        if not isinstance(ended.code, str):
            raise
        print(f"error: {ended.code}", file=sys.stderr)
        sys.exit(2)
