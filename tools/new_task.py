"""Write a new task, one py and one yaml, that passes the checks of all tasks and trains at once.

python tools/new_task.py Reach                                 with a small arm, which is written too
python tools/new_task.py Reach --urdf robots/arm.urdf          with your robot; it gets drives if its file has none
python tools/new_task.py Walk --urdf robots/dog.urdf --free-base
python tools/new_task.py Walk --mjcf robots/dog.xml            a robot with a free base learns to walk forward
python tools/new_task.py Trot --mjcf robots/dog.xml --velocity walks with commanded velocities, as Go1Velocity
python tools/new_task.py MyAnt --from-isaacgymenvs isaacgymenvs/cfg/task/Ant.yaml
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mujoco

    from gpusim_rl.sim import Scene
    from gpusim_rl.sim.legged import LeggedRobot

# fmt: off
ARM = """\
<mujoco model="arm">
  <option timestep="0.005" integrator="implicitfast"/>
  <default><geom type="capsule" size="0.03" contype="0" conaffinity="0"/></default>
  <worldbody>
    <body name="base" pos="0 0 0.6">
      <geom type="sphere" size="0.05" mass="1"/>
      <body name="upper">
        <joint name="shoulder" axis="0 1 0" range="-150 150" damping="0.2"/>
        <geom fromto="0 0 0 0.3 0 0" mass="0.5"/>
        <body name="lower" pos="0.3 0 0">
          <joint name="elbow" axis="0 1 0" range="-150 150" damping="0.2"/>
          <geom fromto="0 0 0 0.25 0 0" mass="0.3"/>
        </body>
      </body>
    </body>
  </worldbody>
  <actuator>
    <position name="shoulder" joint="shoulder" kp="40" kv="4" inheritrange="1"/>
    <position name="elbow" joint="elbow" kp="20" kv="2" inheritrange="1"/>
  </actuator>
</mujoco>
"""
HEAD = '''\
"""$name: $doing"""

from __future__ import annotations

from dataclasses import dataclass
${import_path}from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Parts, Task, TaskConfig
${import_math}from gpusim_rl.sim import Scene, Sim

ROBOT = $robot
# Joints$in_order.
$driven


@dataclass(frozen=True, slots=True, kw_only=True)
class ${name}Config(TaskConfig):
    """Values in $yaml."""

$fields


class $name(Task[${name}Config]):
    """$name: $doing

    Action space: $actions number$actions_s in [-1, 1]: $action_words.

    Observation space:

$table

    Reward per step: $reward_words

    Start: $start_words
    """

    Config = ${name}Config
$units

    @classmethod
    def scene(cls, cfg: ${name}Config) -> Scene:
        scene = Scene(cfg.physics_hz$integrator)
$ground$add$drives        return scene

    def __init__(self, cfg: ${name}Config, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("robot")
        self.num_actions = len(self.robot.actuator_names)
        self.driven = torch.tensor([self.robot.joint_names.index(name) for name in DRIVEN], device=self.device)
        self.pose = self.robot.default_joint_pos[self.driven]  # rad or m
'''
REACH = HEAD + '''\
        low, high = self.robot.joint_limits[self.driven].unbind(dim=1)
        self.reach = ((high - low) / 2).clamp(max=cfg.reach)  # rad or m
        self.limits = low, high
$controls        self.target = torch.zeros(self.num_envs, len(DRIVEN), device=self.device)  # rad or m
        self.scales = {"joint_vel": 0.1}

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        noise = self.random.uniform(-1.0, 1.0, len(self.robot.joint_names))
        start = self.robot.default_joint_pos + self.cfg.start_noise * noise
        self.robot.set_state(where, joint_pos=start.clamp(*self.robot.joint_limits.unbind(dim=1)))
        target = self.pose + self.reach * self.random.uniform(-1.0, 1.0, len(DRIVEN))
        self.target.copy_(torch.where(where[:, None], target.clamp(*self.limits), self.target))

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.robot.actuate($control)

    def observe(self) -> dict[str, Parts]:
        robot = self.robot
        return {"policy": {"joint_pos": robot.joint_pos, "joint_vel": robot.joint_vel, "target": self.target}}

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        way = (self.robot.joint_pos[:, self.driven] - self.target) / self.reach
        return {
            "reach": 1.0 - way.abs().mean(dim=1),
            "action": -self.cfg.action_cost * self.actions.square().mean(dim=1),
        }

    def terminated(self) -> Bool[Tensor, " envs"]:
        return torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
'''
WALK = HEAD + '''\
$controls        self.down = torch.tensor([0.0, 0.0, -1.0], device=self.device).expand(self.num_envs, 3)
        self.scales = {"ang_vel": 0.25, "joint_vel": 0.1}

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        noise = self.random.uniform(-1.0, 1.0, len(self.robot.joint_names))
        start = self.robot.default_joint_pos + self.cfg.start_noise * noise
        self.robot.set_state(where, joint_pos=start.clamp(*self.robot.joint_limits.unbind(dim=1)))

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.robot.actuate($control)

    def observe(self) -> dict[str, Parts]:
        robot = self.robot
        parts = {
            "height": robot.root_pos[:, 2:],
            "gravity": self._gravity(),
            "lin_vel": quat_rotate_inverse(robot.root_quat, robot.root_lin_vel),
            "ang_vel": robot.root_ang_vel_local,
            "joint_pos": robot.joint_pos - robot.default_joint_pos,
            "joint_vel": robot.joint_vel,
            "actions": self.actions,
        }
        return {"policy": parts}

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        return {
            "forward": self.robot.root_lin_vel[:, 0].clamp(-self.cfg.speed, self.cfg.speed),
            "alive": torch.full((self.num_envs,), self.cfg.alive_reward, device=self.device),
            "action": -self.cfg.action_cost * self.actions.square().mean(dim=1),
        }

    def terminated(self) -> Bool[Tensor, " envs"]:
        tilted = self._gravity()[:, 2] > -self.cfg.least_upright
        return tilted | (self.robot.root_pos[:, 2] < self.cfg.least_height)

    def _gravity(self) -> Float[Tensor, "envs 3"]:
        return quat_rotate_inverse(self.robot.root_quat, self.down)
'''
VELOCITY_YAML = """\
# @package _global_
# $name: walk with the commanded velocities. What is not here is in cfg/task/$base.yaml.
defaults: [$base]
task:
  _target_: my_tasks.$module.$name
  rough_weights: {shank_contact: 0.0}
  randomization_params:
    actor_params:
      robot:
        rigid_shape_properties:
          friction: {names: $feet}
          torsion_friction: {names: $feet}
          rolling_friction: {names: $feet}
        rigid_body_properties: {com: {names: [$torso]}}
$ppo"""
YAML = """\
# @package _global_
# $name: $doing
task:
  _target_: my_tasks.$module.$name
  physics_hz: $physics_hz  # Hz, physics steps per second
  control_hz: $control_hz  # Hz, actions per second
  episode_length: $episode_length  # control steps
  clip_actions: $clip_actions
  clip_observations: $clip_observations
  randomize_episode_start: true
$values
num_envs: $num_envs
max_iterations: $max_iterations
ppo:
$ppo
"""
# fmt: on
CONTROLS = """\
        low, high = self.robot.control_limits.unbind(dim=1)
        limited = low.isfinite() & high.isfinite()
        self.middle = torch.where(limited, (low + high) / 2, 0.0)  # of what the actuators take
        self.half = torch.where(limited, (high - low) / 2, 1.0)
"""
WALKING = {
    "doing": "walk forward, and stay upright.",
    "import_math": "from gpusim_rl.env.math import quat_rotate_inverse\n",
    "reward_words": "velocity along x up to `speed` + `alive_reward` - `action_cost` x mean squared action.",
    "start_words": "joints +-`start_noise` around the robot's pose. Termination: it lies or falls over.",
}
REACHING = {
    "doing": "bring the joints to random targets.",
    "import_math": "",
    "reward_words": "1 - mean distance to the targets / `reach` - `action_cost` x mean squared action.",
    "start_words": "joints +-`start_noise` around the robot's pose, targets anywhere in reach. No termination.",
}
NOISE = 0.1  # rad or m, of joints at the start
NARROW = 0.15  # rad, of a leg's joint: a file with less may mean radians where MuJoCo reads degrees

# Where IsaacGymEnvs has its PPO settings, and where we have them; those of env and sim are read one by one below.
PLACES = {"config": "", "config.reward_shaper": "", "network": "network.", "network.mlp": "network."}
WORDS = {"identity": "constant", "None": "none", "legacy": "minibatch", "standard": "epoch"}
"""Values of theirs that have other names here."""
NOT_TOLD = {"seed", "load_checkpoint", "load_path", "algo.name", "model.name", "network.name", "config.value_bootstrap"}
NOT_TOLD |= {f"config.{name}" for name in ("name", "full_experiment_name", "env_name", "multi_gpu", "ppo")}
"""Their settings of a run, which ours has on its command line, and what is always so here."""
READ = {"num_envs", "episode_length", "clip_actions", "clip_observations", "control_frequency_inv"}
SECTIONS = {"name", "physics_engine", "env", "sim", "task"}
NOT_NEEDED = {"env_spacing", "num_observations", "num_actions", "enable_debug_vis", "enable_camera_sensors"}


@dataclass
class Draft:
    """The data that the files are made of."""

    name: str  # name of the task and its class
    folder: Path  # parent of my_tasks and my_cfg
    robot: str = ""  # its file, or a robot of MuJoCo Menagerie
    free_base: bool = False  # whether the first body gets a free joint
    common: dict[str, Any] = field(default_factory=dict)  # given settings that every task has
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)  # the task's own, each with a comment
    values_of: str = ""  # name of the file that gave them
    ppo: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # lines for the user

    @property
    def module(self) -> str:
        """Name of the py file: that of `BallOnPlate` is ball_on_plate."""
        return snake_case(self.name)

    @property
    def of_menagerie(self) -> bool:
        """Whether the robot is a name instead of a file."""
        return self.robot.startswith("menagerie:")


def main(argv: list[str] | None = None) -> int:
    """Writes the files; prints their paths and the next commands."""
    from gpusim_rl.errors import friendly_errors, say

    with friendly_errors():
        say(*new_task(parse(argv)))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="new-task", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", help="of the task and its class: Reach, BallOnPlate")
    robot = parser.add_mutually_exclusive_group()
    robot.add_argument("--urdf", metavar="FILE", help="the robot")
    robot.add_argument("--mjcf", metavar="FILE", help="the robot; or menagerie:unitree_go1")
    parser.add_argument("--free-base", action="store_true", help="give the robot's first body a free joint")
    parser.add_argument("--velocity", action="store_true", help="a walking robot follows commanded velocities")
    parser.add_argument("--feet", metavar="A,B", help="bodies or shapes that stand on the ground, for --velocity")
    parser.add_argument("--from-isaacgymenvs", type=Path, metavar="YAML", help="take the settings of a task of theirs")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for my_tasks and my_cfg (default: this one)")
    parser.add_argument("--overwrite", action="store_true", help="replace the files of a task that exists")
    return parser.parse_args(argv)


def new_task(args: argparse.Namespace) -> list[str]:
    """Writes all files or none; returns the lines for the user."""
    from gpusim_rl.errors import ConfigError
    from gpusim_rl.files.safe_open import replacing
    from gpusim_rl.settings.discover import tasks

    if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", args.name):
        raise ConfigError(f"a task is named like a class, of letters and digits, got {args.name!r}; try Reach")
    if args.name in tasks():
        raise ConfigError(f"there is a task {args.name!r} already; try My{args.name}")
    if not args.out.is_dir():
        raise ConfigError(f"--out {args.out}: there is no such folder")
    draft = Draft(args.name, args.out, args.urdf or args.mjcf or "", args.free_base)
    if args.velocity and (not draft.robot or args.from_isaacgymenvs is not None):
        raise ConfigError("--velocity needs the robot, and takes no settings of IsaacGymEnvs; try --mjcf or --urdf")
    if args.feet is not None and not args.velocity:
        raise ConfigError("--feet is for --velocity; try both")
    if args.from_isaacgymenvs is not None:
        take_settings(draft, args.from_isaacgymenvs)
    source = draft.folder / "my_tasks" / f"{draft.module}.py"
    yaml = draft.folder / "my_cfg" / "task" / f"{draft.name}.yaml"
    files: dict[Path, str] = {}
    if draft.robot and not draft.of_menagerie and not Path(draft.robot).is_file():
        raise ConfigError(f"there is no robot file {draft.robot}")
    if not draft.robot:
        draft.robot = str(draft.folder / "my_tasks" / "assets" / f"{draft.module}.xml")
        files[Path(draft.robot)] = ARM
    for file in {source, yaml, *files}:
        if file.exists() and not args.overwrite:
            raise ConfigError(f"the file {file} exists already; try another name, or --overwrite")
    if args.velocity:
        files[source], files[yaml] = velocity_texts(draft, args.feet.split(",") if args.feet else [])
    else:
        robot = load_robot(draft, ARM if files else None)
        values = own_settings(draft, robot)
        files[source], files[yaml] = class_text(draft, robot, values), yaml_text(draft, robot, values)
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary:
            temporary.write(text.encode())
    go_there = "" if args.out == Path() else f"cd {shlex.quote(str(args.out))} && "
    next_steps = [
        f"{go_there}python {tool('check_task', args.out)} {draft.name} -cd my_cfg",
        f"{go_there}python {tool('train', args.out)} -cd my_cfg task={draft.name}",
        f"{go_there}python {tool('export', args.out)} {draft.name} -cd my_cfg",
    ]
    return [*(f"wrote {file}" for file in files), *draft.notes, "next:", *(f"  {step}" for step in next_steps)]


def snake_case(name: str) -> str:
    """Returns `jointVelScale` as joint_vel_scale."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def tool(name: str, folder: Path) -> str:
    """Returns a script of ours, as the user types it in a folder."""
    from gpusim_rl.files import paths

    file = paths.train_file() if name == "train" else paths.tools_dir() / f"{name}.py"
    near = file.is_relative_to(folder.resolve())
    return shlex.quote(str(file.relative_to(folder.resolve()) if near else file))


# IsaacGymEnvs


def take_settings(draft: Draft, file: Path) -> None:
    """Reads the yaml of a task of IsaacGymEnvs, its PPO settings beside it, and the path of its robot.

    Raises:
        ConfigError: The file is no such yaml, or does not tell the robot.
    """
    from gpusim_rl.connect.task_text import number
    from gpusim_rl.errors import ConfigError

    theirs = read_yaml(file)
    if not isinstance(theirs.get("env"), dict):
        raise ConfigError(f"{file}: not a task of IsaacGymEnvs: it has no 'env'; try isaacgymenvs/cfg/task/Ant.yaml")
    env = {snake_case(key): value for key, value in theirs["env"].items()}
    physics = theirs.get("sim") or {}
    rate = max(1, round(1 / physics.get("dt", 1 / 60)))  # they write 1/60 s as 0.0166
    draft.common = {key: env[key] for key in READ & env.keys() if key != "control_frequency_inv"}
    draft.common["physics_hz"] = rate * physics.get("substeps", 1)
    draft.common["control_hz"] = number(rate / env.get("control_frequency_inv", 1))
    of_task = {key: value for key, value in env.items() if key not in READ | NOT_NEEDED}
    more = {f"sim.{key}": value for key, value in physics.items() if key not in ("dt", "substeps")}
    more |= {f"task.{key}": value for key, value in (theirs.get("task") or {}).items()}
    asset = of_task.pop("asset", None) or {}
    more |= {f"asset.{key}": value for key, value in asset.items() if key not in ("assetFileName", "assetRoot")}
    more |= {key: value for key, value in theirs.items() if key not in SECTIONS}
    draft.values = {key: (value, "") for key, value in of_task.items() if isinstance(value, int | float)}
    draft.values_of = file.name
    if ignored := [*(key for key in of_task if key not in draft.values), *more]:
        draft.notes.append(f"not taken from {file.name}: {', '.join(ignored)}")
    asset = asset.get("assetFileName")
    if not draft.robot and asset:
        draft.robot = str(file.resolve().parents[3] / "assets" / asset)
    if not draft.robot:
        raise ConfigError(f"{file} does not tell the robot's file; try --urdf or --mjcf")
    algorithm = file.parent.parent / "train" / f"{file.stem}PPO.yaml"
    if not algorithm.is_file():
        draft.notes.append(f"no PPO settings of theirs: there is no {algorithm}")
        return
    params = read_yaml(algorithm).get("params") or {}
    given = leaves(params)
    ours = {path: our_key(path) for path in given}
    taken = {key: given[path] for path, key in ours.items() if key}
    taken = {key: WORDS.get(value, value) if isinstance(value, str) else value for key, value in taken.items()}
    if look_up(params, "config.truncate_grads") is False:
        taken["max_grad_norm"] = None
    for key, value in taken.items():
        section, _, leaf = key.rpartition(".")
        (draft.ppo.setdefault(section, {}) if section else draft.ppo)[leaf] = value
    if isinstance(epochs := look_up(params, "config.max_epochs"), int):
        draft.common["max_iterations"] = epochs
    known = {*NOT_TOLD, "config.max_epochs", "config.truncate_grads"}
    if ignored := [path for path in given if not ours[path] and path not in known]:
        draft.notes.append(f"not taken from {algorithm.name}: {', '.join(ignored)}")


def our_key(path: str) -> str:
    """Returns what a PPO setting of theirs is called below our `ppo`; nothing where we have none of the kind."""
    from gpusim_rl.settings.checks import OTHERS, known_keys

    above, _, leaf = path.rpartition(".")
    key = f"{PLACES.get(above)}{OTHERS.get(leaf, leaf)}"
    return key if above in PLACES and f"ppo.{key}" in known_keys() else ""


def leaves(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Returns the values of nested settings by their path, such as config.gamma."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= leaves(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return found


def read_yaml(file: Path) -> dict[str, Any]:
    """Reads a yaml of theirs; `${resolve_default:4096,...}` is 4096.

    Raises:
        ConfigError: The file cannot be read.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from gpusim_rl.errors import ConfigError
    from gpusim_rl.sim.robot_file import one_line

    def resolved(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): resolved(item) for key, item in value.items()}
        default = re.match(r"\$\{resolve_default:\s*([^,}]+)", value) if isinstance(value, str) else None
        return yaml.safe_load(default[1]) if default else value

    try:
        content = resolved(OmegaConf.to_container(OmegaConf.load(file)))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"cannot read {file}: {one_line(error)}") from None
    return content if isinstance(content, dict) else {}


def look_up(values: Any, path: str) -> Any:
    """Returns the value at a path like config.gamma, or None."""
    for key in path.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values


# The robot


@dataclass(kw_only=True)
class RobotFacts:
    """What the class must know of the robot."""

    free: bool  # whether its base is free
    joints: list[str]
    unit: str  # unit of their positions
    driven: list[str]  # the joint of each actuator, or all joints where an actuator is not of a joint
    servos: bool  # whether every control is a position of its joint
    actuators: int
    gains: dict[str, tuple[float, float]] | None  # stiffness and damping of `driven`, if the file has no actuators
    has_ground: bool
    keyframe: bool  # whether the file has one called `home`
    height: float  # height of the first body in the world [m]
    lift: float  # how much higher the robot must be so that it is above the ground [m]
    physics_hz: float | int


def load_robot(draft: Draft, arm: str | None) -> RobotFacts:
    """Loads the robot's file.

    Args:
        draft: Draft that names the robot.
        arm: MJCF of the arm that is written too; None reads the robot's file.

    Raises:
        TaskError: The scene cannot take it, or nothing can drive it.
    """
    import mujoco

    from gpusim_rl.connect.task_text import number
    from gpusim_rl.errors import TaskError
    from gpusim_rl.sim import Scene

    spec = None
    if arm is not None:
        spec = mujoco.MjSpec.from_string(arm)
    elif not draft.of_menagerie and draft.robot.endswith(".xml"):
        spec = read_spec(draft.robot)
    physics_hz = 200 if spec is None else number(1 / spec.option.timestep)
    keyframe = spec is not None and any(key.name == "home" for key in spec.keys)
    scene = Scene(500)
    robot: Any = draft.robot if arm is None or spec is None else spec
    scene.add("robot", robot, keyframe="home" if keyframe else None, fixed_base=False if draft.free_base else None)
    model = scene.model
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    bodies = scene.bodies_of("robot")
    if not bodies:
        raise TaskError(f"{draft.robot} has no body")
    kinds = {i: mujoco.mjtJoint(model.jnt_type[i]) for i in range(model.njnt) if model.jnt_bodyid[i] in bodies}
    free = mujoco.mjtJoint.mjJNT_FREE in kinds.values()
    hinge, slide = mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE
    moving = [i for i, kind in kinds.items() if kind in (hinge, slide)]
    names = {i: model.joint(i).name.removeprefix("robot/") for i in moving}
    lift = math.ceil(100 * max(0.0, -lowest_point(model, data, bodies, moving))) / 100
    height = float(data.xpos[bodies[0], 2]) + lift

    of_joint = [
        model.actuator_trnid[a, 0]
        for a in range(model.nu)
        if model.actuator_trntype[a] == mujoco.mjtTrn.mjTRN_JOINT.value
    ]
    driven = [i for i in of_joint if i in moving]
    gains = None
    if model.nu == 0:
        followers = {model.eq_obj1id[e] for e in range(model.neq) if model.eq_type[e] == mujoco.mjtEq.mjEQ_JOINT.value}
        driven = [i for i in moving if i not in followers]
        gains = {names[i]: usual_gains(model, data, i, height if free else None) for i in driven}
    if not driven and not moving:
        raise TaskError(f"{draft.robot}: the robot has no joint that a drive could move; try --free-base?")
    one_each = len(driven) >= model.nu  # every actuator is of a joint
    servos = one_each and all(
        model.actuator_biastype[a] == mujoco.mjtBias.mjBIAS_AFFINE.value
        and model.actuator_biasprm[a, 1] == -model.actuator_gainprm[a, 0] != 0
        for a in range(model.nu)
    )
    slides = [kinds[i] == slide for i in moving]
    ground = (mujoco.mjtGeom.mjGEOM_PLANE.value, mujoco.mjtGeom.mjGEOM_HFIELD.value)
    return RobotFacts(
        free=free,
        joints=[names[i] for i in moving],
        unit="m" if slides and all(slides) else "rad or m" if any(slides) else "rad",
        driven=[names[i] for i in (driven if one_each else moving)],
        servos=servos,
        actuators=model.nu or len(driven),
        gains=gains,
        has_ground=any(model.geom_bodyid[i] == 0 and model.geom_type[i] in ground for i in range(model.ngeom)),
        keyframe=keyframe,
        height=height,
        lift=lift,
        physics_hz=physics_hz,
    )


def read_spec(file: str) -> mujoco.MjSpec:
    """Reads an MJCF file; its error is one line."""
    import mujoco

    from gpusim_rl.errors import TaskError
    from gpusim_rl.sim.robot_file import one_line

    try:
        return mujoco.MjSpec.from_file(file)
    except ValueError as error:
        raise TaskError(f"{file}: {one_line(error)}") from None


def lowest_point(model: mujoco.MjModel, data: mujoco.MjData, bodies: list[int], joints: list[int]) -> float:
    """Returns the height of the robot's lowest point over poses that a start may have [m]; 0 without geoms."""
    import mujoco
    import numpy as np

    addresses = [model.jnt_qposadr[i] for i in joints]
    random, pose, lowest = np.random.default_rng(0), data.qpos.copy(), math.inf
    for _ in range(64):
        data.qpos[addresses] = pose[addresses] + NOISE * random.uniform(-1, 1, len(addresses))
        mujoco.mj_kinematics(model, data)
        for i in range(model.ngeom):
            if model.geom_bodyid[i] in bodies:
                middle, half = model.geom_aabb[i, :3], model.geom_aabb[i, 3:]
                turned = data.geom_xmat[i].reshape(3, 3)
                lowest = min(lowest, float((data.geom_xpos[i] + turned @ middle)[2] - (np.abs(turned) @ half)[2]))
    data.qpos[:] = pose
    mujoco.mj_forward(model, data)
    return lowest if math.isfinite(lowest) else 0.0


def usual_gains(model: mujoco.MjModel, data: mujoco.MjData, joint: int, height: float | None) -> tuple[float, float]:
    """Stiffness and damping that hold the robot up: a first guess, to be tuned.

    On a fixed base a joint answers at 3 Hz, critically damped, and sinks by at most 0.1 rad (1 cm of a slide) under the
    weight of what hangs on it. Legs carry the robot: with 1.2 of its weight times its height a quadruped stands still,
    with half of that it tips over.
    """
    import mujoco
    import numpy as np

    body, gravity = model.jnt_bodyid[joint], float(np.linalg.norm(model.opt.gravity))
    if height is not None:
        stiffness = 1.2 * float(model.body_subtreemass[model.body_rootid[body]]) * gravity * max(height, 0.1)
        return rounded(stiffness), rounded(stiffness / 40)
    mass = np.zeros((model.nv, model.nv))
    mujoco.mj_fullM(model, data, mass)
    inertia = float(mass[model.jnt_dofadr[joint], model.jnt_dofadr[joint]])
    slide = model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_SLIDE.value
    arm = 1.0 if slide else float(np.linalg.norm(data.subtree_com[body] - data.xanchor[joint]))
    weight = float(model.body_subtreemass[body]) * gravity * arm
    stiffness = max(inertia * (2 * math.pi * 3) ** 2, weight / (0.01 if slide else 0.1))
    return rounded(stiffness), rounded(2 * math.sqrt(stiffness * inertia))


def rounded(value: float) -> float:
    """Returns a value of two digits."""
    return float(f"{value:.2g}")


# The task


def observations(robot: RobotFacts) -> list[tuple[str, int, str, str]]:
    """Returns name, size, meaning and unit of what the policy sees."""
    joints, unit = len(robot.joints), robot.unit
    velocities = ("joint_vel", joints, "joint velocities", " or ".join(f"{each}/s" for each in unit.split(" or ")))
    if robot.free:
        rows = [
            ("height", 1, "height of the robot's first body", "m"),
            ("gravity", 3, "direction of gravity in its frame", "-"),
            ("lin_vel", 3, "its velocity, in its frame", "m/s"),
            ("ang_vel", 3, "its angular velocity, in its frame", "rad/s"),
            ("joint_pos", joints, "joint positions - those of the start", unit),
            velocities,
            ("actions", robot.actuators, "last actions", "-"),
        ]
    else:
        target = ("target", len(robot.driven), "targets of the joints in DRIVEN", unit)
        rows = [("joint_pos", joints, "joint positions", unit), velocities, target]
    return [row for row in rows if row[1]]


def own_settings(draft: Draft, robot: RobotFacts) -> dict[str, tuple[Any, str]]:
    """Returns the settings of the task itself, each with a comment."""
    values: dict[str, tuple[Any, str]] = {"start_noise": (NOISE, "rad or m, of the joints at the start")}
    if robot.free:
        values["speed"] = (1.0, "m/s, of which the reward sees no more")
        values["alive_reward"] = (0.5, "per step")
        values["least_height"] = (rounded(0.5 * robot.height), "m, of the first body; lower ends the episode")
        values["least_upright"] = (0.5, "cosine of its tilt; less ends the episode")
        if robot.servos:
            values["reach"] = (0.5, "rad or m, between the joints' start and their targets at action 1")
    else:
        values["reach"] = (1.0, "rad or m, between the joints' start and their targets; at most half their range")
    values["action_cost"] = (0.01, "x mean squared action")
    if robot.gains:
        values["stiffness"] = ({joint: gains[0] for joint, gains in robot.gains.items()}, "N m/rad or N/m")
        values["damping"] = ({joint: gains[1] for joint, gains in robot.gains.items()}, "N m s/rad or N s/m")
    theirs = {key: value for key, value in draft.values.items() if key not in values}
    if theirs:
        draft.notes.insert(0, f"from {draft.values_of}, in the yaml, not used by the class yet: {', '.join(theirs)}")
    if doubles := [key for key in draft.values if key in values]:
        draft.notes.append(f"not taken from {draft.values_of}, for the class has its own: {', '.join(doubles)}")
    return values | theirs


def class_text(draft: Draft, robot: RobotFacts, values: Mapping[str, tuple[Any, str]]) -> str:
    """Returns the content of the py file."""
    from gpusim_rl.connect.task_text import table, type_of, wrapped

    arguments = ['"robot"', "ROBOT"]
    if robot.lift:
        arguments.append(f"pos=(0.0, 0.0, {robot.lift:g})")
    if robot.keyframe:
        arguments.append('keyframe="home"')
    if draft.free_base:
        arguments.append("fixed_base=False")
    drives = ""
    if robot.gains:
        kind = 'kind="position", stiffness=cfg.stiffness, damping=cfg.damping'
        drives = f'        scene.add_actuators("robot", DRIVEN, {kind})\n'
        draft.notes.append("the robot has no actuators: the yaml gives its joints position drives; tune their gains")
    place, import_path = robot_place(draft)
    if robot.servos:
        control, controls = f"self.pose + {'self.cfg.reach' if robot.free else 'self.reach'} * action", ""
        action_words = "targets of the joints in DRIVEN, `reach` around their start"
    else:
        control, controls = "self.middle + self.half * action", CONTROLS
        action_words = "controls of the actuators, over their range"
    rows = observations(robot)
    return Template(WALK if robot.free else REACH).substitute(
        WALKING if robot.free else REACHING,
        name=draft.name,
        yaml=f"my_cfg/task/{draft.name}.yaml",
        import_path=import_path,
        robot=place,
        driven=wrapped("DRIVEN = ", "()", [f'"{joint}"' for joint in robot.driven]),
        in_order=" of the actuators, in their order" if len(robot.driven) == robot.actuators else "",
        fields="\n".join(f"    {key}: {type_of(value)}" for key, (value, _) in values.items()),
        actions=robot.actuators,
        actions_s="s" if robot.actuators > 1 else "",
        action_words=action_words,
        table=table(rows),
        units=wrapped("    units: ClassVar = ", "{}", [f'"{name}": "{unit}"' for name, _, _, unit in rows]),
        integrator=', integrator="implicitfast"' if robot.gains else "",
        ground="" if robot.has_ground else "        scene.add_ground()\n",
        add=f"        scene.add({', '.join(arguments)})\n",
        drives=drives,
        controls=controls,
        control=control,
    )


def robot_place(draft: Draft) -> tuple[str, str]:
    """Returns the expression that is the robot's file, and the import that it needs."""
    if draft.of_menagerie:
        return f'"{draft.robot}"', ""
    relative = os.path.relpath(Path(draft.robot).resolve(), (draft.folder / "my_tasks").resolve())
    return f'Path(__file__).parent / "{Path(relative).as_posix()}"', "from pathlib import Path\n"


def yaml_text(draft: Draft, robot: RobotFacts, values: Mapping[str, tuple[Any, str]]) -> str:
    """Returns the content of the yaml."""
    from gpusim_rl.connect.task_text import commented_yaml, number

    common = draft.common
    physics_hz = common.get("physics_hz", robot.physics_hz)
    control_hz = number(physics_hz / max(1, round(physics_hz / common.get("control_hz", 50))))
    ppo = draft.ppo or {"horizon": 24, "epochs": 5, "minibatch_size": 6144, "network": {"hidden": [128, 64]}}
    return Template(YAML).substitute(
        doing=(WALKING if robot.free else REACHING)["doing"],
        module=draft.module,
        name=draft.name,
        physics_hz=physics_hz,
        control_hz=control_hz,
        episode_length=common.get("episode_length", round((10 if robot.free else 3) * control_hz)),
        clip_actions=common.get("clip_actions", 1.0),
        clip_observations=json.dumps(common.get("clip_observations")),
        values=commented_yaml(values),
        num_envs=common.get("num_envs", 1024),
        max_iterations=common.get("max_iterations", 300 if robot.free else 100),
        ppo="\n".join(f"  {key}: {json.dumps(value)}" for key, value in ppo.items()),
    )


def velocity_texts(draft: Draft, feet: list[str]) -> tuple[str, str]:
    """Returns the content of the py file and of the yaml of a robot that follows commanded velocities."""
    from gpusim_rl.connect.task_text import by_pattern, velocity_source
    from gpusim_rl.errors import TaskError
    from gpusim_rl.sim import Scene
    from gpusim_rl.sim.mirror_image import MirrorImage
    from gpusim_rl.sim.urdf import is_urdf

    scene, keys, degrees = Scene(200), [], False
    urdf = not draft.of_menagerie and is_urdf(Path(draft.robot))
    free = draft.free_base or urdf  # URDF has no free joints
    if not urdf and not draft.of_menagerie:
        spec = read_spec(draft.robot)
        keys, degrees = [key.name for key in spec.keys if key.name], bool(spec.compiler.degree)
    stance = next((key for word in ("home", "stand", "") for key in keys if word in key), None)
    scene.add("robot", draft.robot, keyframe=stance, fixed_base=False if free else None)
    try:
        robot = read_robot(scene, feet, degrees)
    except TaskError as error:
        raise TaskError(f"{draft.robot}: {error}") from None
    draft.notes += robot.notes
    mirrors = ""
    try:
        MirrorImage(scene, "robot").measure()
    except TaskError as error:
        draft.notes.append(f"the task has no mirror images: {error}")
        mirrors = "    mirrors: ClassVar = {}  # the robot has no mirror image\n"
    joints, biped = list(robot.pose), len(robot.feet) == 2
    sites = {f"{foot.item.partition(':')[2]}_sole": f"({json.dumps(foot.body)}, {foot.sole})" for foot in robot.feet}
    soles = tuple(sites)
    if robot.imu is None:
        sites["imu"] = f"({json.dumps(robot.root)}, (0.0, 0.0, 0.0))"
    pose = {joint: value for joint, value in robot.pose.items() if value}
    motors = {
        joint: f"Motor.tuned(armature={armature:g}, effort={effort:g})"
        for joint, (armature, effort) in robot.motors.items()
    }
    widths = dict.fromkeys(robot.pitches, (0.05, 0.3, 0.5) if biped else (0.05, 0.3, 0.3))
    widths |= dict.fromkeys(robot.knees, (0.05, 0.35, 0.6) if biped else (0.1, 0.6, 0.6))
    others = {"*": (0.05, 0.15, 0.2) if biped else (0.05, 0.3, 0.3)}
    values = {
        "root": json.dumps(robot.root),
        "torso": json.dumps(robot.torso),
        "imu": json.dumps(robot.imu or "imu"),
        "feet": tuple(foot.item for foot in robot.feet),
        "soles": soles,
        "height": f"{robot.height:g}",
        "pose": by_pattern(joints, pose),
        "motors": by_pattern(joints, motors),
        "widths": {**by_pattern(joints, widths), **others},
        "trot": robot.trot if not biped else "",
        "elliptic": "True" if not biped else "",
        "fixed_base": "False" if free else "",
        "sites": sites,
    }
    place, import_path = robot_place(draft)
    imports = import_path + ("from typing import ClassVar\n" if mirrors else "")
    source = velocity_source(
        values,
        len(joints),
        mirrors=mirrors and f"{mirrors}\n",
        name=draft.name,
        import_path=imports and f"\n{imports}",
        robot_name=snake_case(draft.name),
        robot=place,
    )
    yaml = Template(VELOCITY_YAML).substitute(
        name=draft.name,
        base="G1Velocity" if biped else "Go1Velocity",
        module=draft.module,
        feet=json.dumps([*dict.fromkeys(foot.body for foot in robot.feet)]),
        torso=json.dumps(robot.torso),
        ppo=mirrors and "ppo: {symmetry: {augment: false}}  # the robot has no mirror image\n",
    )
    return source, yaml


def read_robot(scene: Scene, feet: list[str], degrees: bool) -> LeggedRobot:
    """Reads a robot that stands on limbs; where the file's angles are degrees, warns of legs that hardly turn."""
    import mujoco

    from gpusim_rl.errors import TaskError, warn
    from gpusim_rl.sim.legged import read_legged

    model, bodies, limbs = scene.model, scene.elements_of("robot", "body"), dict[int, list[int]]()
    for i in bodies.values():  # parents come first
        moving = int(model.body_weldid[i])
        above = limbs.get(int(model.body_parentid[moving]))
        limbs[i] = [] if above is None else [*above, moving]  # what moves between the root and the body
    inner = {i for limb in limbs.values() for i in limb[:-1]}
    ends = [body for body, i in bodies.items() if i in limbs[i] and i not in inner]
    if len(ends) < 2:
        raise TaskError("the robot has no two limbs to stand on; try without --velocity, which makes a general task")
    robot = read_legged(scene, "robot", feet)
    legs = {foot.item.partition(":")[2]: {*limbs[bodies[foot.body]]} for foot in robot.feet}
    wrong = [f", unlike {one!r}" for one in legs for two in legs if one != two and legs[one] <= legs[two]]
    if feet and (wrong or len(legs) < 2):
        expected = f"expected two or more, each on a limb of its own{''.join(wrong[:1])}"
        raise TaskError(f"--feet {','.join(feet)}: {expected}; try two or more of {ends}")
    narrow = [
        f"{joint} from {math.degrees(low):.3g} to {math.degrees(high):.3g} degrees"
        for joint, j in scene.elements_of("robot", "joint").items()
        for low, high in [model.jnt_range[j]]
        if 0 < high - low < NARROW and model.jnt_type[j] == mujoco.mjtJoint.mjJNT_HINGE
        if any(model.jnt_bodyid[j] in leg for leg in legs.values())
    ]
    if degrees and narrow:
        said = f"{len(narrow)} joints of legs hardly turn, {narrow[0]}"
        warn(f'{said}; if these are radians, the file needs <compiler angle="radian"/>')
    return robot


if __name__ == "__main__":
    # As for train.py: the checkout that this file is in, whether it is installed or not.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.exit(main())
