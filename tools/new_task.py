"""Write the .py and .yaml files of a new task.

gpusim-rl new-task Reach                                 with a small example arm
gpusim-rl new-task Reach --urdf robots/arm.urdf          with your robot
gpusim-rl new-task Trot --mjcf robots/dog.xml --velocity    a robot that tracks commanded velocities
gpusim-rl new-task MyAnt --from-isaacgymenvs isaacgymenvs/cfg/task/Ant.yaml    import a task
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import logging
import math
import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.connect import isaacgymenvs, task_text
from gpusim_rl.connect.isaacgymenvs import is_number, look_up, merge, section, snake_case, without_references
from gpusim_rl.connect.task_text import by_pattern, literal, number, render, rounded
from gpusim_rl.errors import ConfigError, TaskError, friendly_errors, say, warn
from gpusim_rl.files.safe_open import replacing
from gpusim_rl.options import Parser
from gpusim_rl.settings.checks import build, plain
from gpusim_rl.settings.discover import tasks
from gpusim_rl.settings.schema import PPOConfig, SimConfig

if TYPE_CHECKING:
    import mujoco

    from gpusim_rl.sim import Scene
    from gpusim_rl.sim.legged import LeggedRobot

TEMPLATES = Path(__file__).with_name("templates")
ARM = TEMPLATES / "arm.xml"
DOING = {False: "move the joints to random targets.", True: "walk forward and stay upright."}  # by `RobotFacts.free`
NEEDS = {"feet": ("velocity",), "packages": ("urdf",), "velocity": ("urdf", "mjcf")}
"""Flags that need at least one of the listed flags."""
OBSOLETE = re.compile(r"unrecognized attribute: '(\w+)'\s*Element '(\w+)'")
NOISE = 0.1  # initial joint noise [rad or m]
NARROW = 0.15  # range of a leg joint [rad]; a smaller one suggests radians that MuJoCo reads as degrees


@dataclass
class Draft:
    """Settings and robot of the new task."""

    name: str  # name of the task and its class
    folder: Path  # parent of my_tasks and my_cfg
    robot: str = ""  # robot file, or a robot of MuJoCo Menagerie
    free_base: bool | None = None  # whether the first body gets a free joint; None = as in the file
    packages: dict[str, Path] = field(default_factory=dict)  # folders of ROS packages
    common: dict[str, Any] = field(default_factory=dict)  # settings shared by all tasks, if given
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)  # task-specific settings, each with a comment
    values_of: str = ""  # name of the file with these values
    gains: dict[str, float] = field(default_factory=dict)  # `stiffness` and `damping` of all drives, if given
    pose: dict[str, float] = field(default_factory=dict)  # initial joint positions [rad or m], if given
    height: float | None = None  # initial height of the first body [m], if given
    random: dict[str, Any] = field(default_factory=dict)  # `randomize` and `randomization_params`, if given
    ppo: dict[str, Any] = field(default_factory=dict)
    log: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # lines for the user

    @property
    def module(self) -> str:
        """Name of the Python file, such as ball_on_plate for `BallOnPlate`."""
        return snake_case(self.name)

    @property
    def from_menagerie(self) -> bool:
        """True if the robot comes from MuJoCo Menagerie."""
        return self.robot.startswith("menagerie:")

    @property
    def fixed_base(self) -> bool | None:
        """Value for the argument `fixed_base` of `Scene.add`."""
        return None if self.free_base is None else not self.free_base


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        say(*new_task(parse(argv)))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("new-task", __doc__)
    parser.option("name", "name of the task and its class, e.g. BallOnPlate", "Arguments")
    robot = parser.add_mutually_exclusive_group()
    parser.option("--urdf", "robot file", "Robot", metavar="FILE", among=robot)
    parser.option("--mjcf", "robot file, or menagerie:NAME", "Robot", metavar="FILE", among=robot)
    parser.option("--packages")
    parser.option("--free-base", "add or remove the base's free joint", "Robot", action=argparse.BooleanOptionalAction)
    parser.option("--feet", "bodies or shapes that touch the ground, for --velocity", "Robot", metavar="A,B")
    kind = parser.add_mutually_exclusive_group()
    parser.option("--velocity", "make a walking robot track velocities", "Task", action="store_true", among=kind)
    parser.option("--from-isaacgymenvs", "settings from IsaacGymEnvs", "Task", type=Path, metavar="YAML", among=kind)
    parser.option("--out", "folder of my_tasks and my_cfg", default=Path())
    parser.option("--overwrite")
    return parser.parse_args(argv)


def new_task(args: argparse.Namespace) -> list[str]:
    """Write all files or none; return the lines to print."""
    if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", args.name):
        raise ConfigError(key="name", expected="a CamelCase class name such as Reach", got=args.name)
    if args.name in tasks():
        raise ConfigError(f"task {args.name!r} already exists", hint=f"Try My{args.name}")
    if not args.out.is_dir():
        raise ConfigError("no such folder", key=f"--out {args.out}")
    for flag, others in NEEDS.items():
        if getattr(args, flag) and not any(getattr(args, other) for other in others):
            raise ConfigError(f"--{flag} needs --{' or --'.join(others)}")
    draft = Draft(args.name, args.out, args.urdf or args.mjcf or "", args.free_base, dict(args.packages))
    if args.from_isaacgymenvs is not None:
        take_settings(draft, args.from_isaacgymenvs)
    if draft.robot and not draft.from_menagerie and not Path(draft.robot).is_file():
        raise ConfigError("no such robot file", key=draft.robot)
    files: dict[Path, str | bytes] = {}
    source = draft.robot
    if not draft.robot:
        draft.robot, source = str(draft.folder / "my_tasks" / "assets" / f"{draft.module}.xml"), str(ARM)
        files[Path(draft.robot)] = ARM.read_text()
    if args.velocity:
        texts = velocity_texts(draft, args.feet.split(",") if args.feet else [])
    else:
        robot = load_robot(draft, source)
        values = own_settings(draft, robot)
        if args.from_isaacgymenvs is not None and args.urdf is None and args.mjcf is None:
            files |= copy_of_robot(draft, robot)
        texts = class_text(draft, robot, values), yaml_text(draft, robot, values)
    files[draft.folder / "my_tasks" / f"{draft.module}.py"] = texts[0]
    files[draft.folder / "my_cfg" / "task" / f"{draft.name}.yaml"] = texts[1]
    for file in files:
        if file.exists() and not args.overwrite:
            raise ConfigError("already exists", key=str(file), hint="Try another name, or --overwrite")
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary:
            temporary.write(text.encode() if isinstance(text, str) else text)
    go_there = "" if args.out == Path() else f"cd {shlex.quote(str(args.out))} && "
    steps = [f"check-task {draft.name} -cd my_cfg", f"train -cd my_cfg task={draft.name}"]
    steps.append(f"export {draft.name} -cd my_cfg")
    parts = [file for file in files if file.parent.name == "assets" and isinstance(files[file], bytes)]
    wrote = [f"wrote {file}" for file in files if file not in parts]
    wrote += [f"wrote {len(parts)} meshes and images to {parts[0].parent}"] if parts else []
    return [*wrote, *draft.notes, "next:", *(f"  {go_there}gpusim-rl {step}" for step in steps)]


def take_settings(draft: Draft, file: Path) -> None:
    """Read an IsaacGymEnvs task's yaml, the PPO settings next to it, and the path of the robot.

    Raises:
        ConfigError: The file is not the yaml of an IsaacGymEnvs task, or does not name the robot.
    """
    theirs = isaacgymenvs.read_settings(file)
    if not isinstance(theirs.get("env"), dict):
        hint = "Try a yaml in cfg/task, such as isaacgymenvs/cfg/task/Ant.yaml"
        raise ConfigError("not an IsaacGymEnvs task: no `env` section", key=str(file), hint=hint)
    name = str(theirs.get("name", file.stem))
    code = isaacgymenvs.read_code(file, name)
    for other in re.findall(r"""["']task/(\w+)\.yaml["']""", "".join(code)):  # Factory's classes read these at run time
        if other != file.stem and (base := file.parent / f"{other}.yaml").is_file():
            theirs = merge(isaacgymenvs.read_settings(base), theirs)
    physics = section(theirs, "sim")
    others = {key: value for key, value in theirs.items() if key not in isaacgymenvs.SECTIONS}
    env = isaacgymenvs.snake_keys(others | section(theirs, "env"))
    if "num_envs" not in env:
        draft.notes.append(f"{file.name} has no numEnvs, so it may be only a base for other tasks")
    draft.values_of, ignored = file.name, [key for key in ("viewer",) if key in theirs or key in env]
    draft.common = isaacgymenvs.read_rates(env, physics, str(file))
    ignored += [f"sim.{key}" for key in physics if key not in ("dt", "substeps")]
    ignored += take_robot(draft, env, file, code)
    ignored += take_randomization(draft, section(theirs, "task"))
    control, state = section(env, "control"), section(env, "base_init_state")
    draft.gains = {key: control[key] for key in ("stiffness", "damping") if is_number(control.get(key))}
    angles = section(env, "default_joint_angles")
    draft.pose = {str(joint): float(angle) for joint, angle in angles.items() if is_number(angle)}
    if isinstance(state.get("pos"), list) and len(state["pos"]) == 3 and is_number(state["pos"][2]):
        draft.height = float(state.pop("pos")[2])
    if draft.pose:
        draft.values["default_joint_angles"] = draft.pose, "rad or m, at the start and at action 0"
    for key, value in env.items():
        if key in isaacgymenvs.NO_FIELDS:
            continue
        kept = without_references(value, key, ignored)
        if isaacgymenvs.is_new_field(key) and kept not in (None, {}):
            draft.values[key] = kept, ""
        else:
            ignored += [] if key in ignored else [key]
    if ignored:
        draft.notes.append(f"ignored in {file.name}: {', '.join(dict.fromkeys(ignored))}")
    take_ppo(draft, file, name)


def take_robot(draft: Draft, env: dict[str, Any], file: Path, code: list[str]) -> list[str]:
    """Find the robot's file, and decide whether its base is free; return the ignored asset settings.

    Raises:
        ConfigError: The yaml does not name the robot, or the robot is not among the assets.
    """
    assets = section(env, "asset") | section(env, "urdf_asset")
    files = {key: value for key, value in assets.items() if str(value).endswith((".urdf", ".xml"))}
    key = next((key for key in ("asset_file_name", "file", *files) if key in files), None)
    named = [str(files[key])] if key is not None else re.findall(isaacgymenvs.ASSET, "\n".join(code))
    found = {name: path for name in named if (path := isaacgymenvs.find_asset(file, name)) is not None}
    moving = [name for name, path in found.items() if key is not None or isaacgymenvs.has_moving_joint(path)]
    if not draft.robot:
        if not moving:
            raise no_robot(file, named, code)
        draft.robot = str(found[moving[0]])
        if key is None:
            name = found[moving[0]].name
            draft.notes.append(f"the robot is {name}, from IsaacGymEnvs' code; the yaml does not name one")
    fixed = assets.get("fix_base_link")
    if draft.free_base is None and not draft.robot.endswith(".xml"):
        word = isaacgymenvs.camel_case(key) if key is not None else (moving or named or [""])[0]
        fixed = fixed if isinstance(fixed, bool) else isaacgymenvs.base_is_fixed(code, word)
        draft.free_base = not fixed
        source = "as in IsaacGymEnvs" if fixed is not None else "IsaacGym's default"
        other = "--free-base" if fixed else "--no-free-base"
        draft.notes.append(f"the robot's base is {'fixed' if fixed else 'free'}, {source}; change it with {other}")
    return [f"asset.{name}" for name in assets if name not in (key, "asset_root", "fix_base_link")]


def no_robot(file: Path, named: list[str], code: list[str]) -> ConfigError:
    """Build the error for a yaml that names no usable robot."""
    hint = f"The task names {named[0]}, which is not among IsaacGymEnvs' assets. " if named else ""
    if named and re.search(rf"\.write\(\s*[\"']{re.escape(named[0])}[\"']", "\n".join(code)):
        hint += "IsaacGymEnvs' code writes that file: run it once. "
    ours = f", or our task={file.stem}" if file.stem in tasks() else ""
    return ConfigError("no robot file found", key=str(file), hint=f"{hint}Try --urdf or --mjcf{ours}")


def take_randomization(draft: Draft, task: dict[str, Any]) -> list[str]:
    """Read `task.randomize` and `randomization_params`; return the ignored settings."""
    ignored = [f"task.{key}" for key in task if key not in ("randomize", "randomization_params")]
    if isinstance(task.get("randomize"), bool):
        draft.random["randomize"] = task["randomize"]
    params = without_references(section(task, "randomization_params"), "task.randomization_params", ignored)
    adr = section(task, "adr")
    for key in section(adr, "params") if adr.get("use_adr") is True else ():  # ADR has its own initial ranges
        grown = section(adr["params"], key)
        above, _, leaf = str(grown.get("range_path")).rpartition(".")
        if leaf == "range" and isinstance(node := look_up(params, above), dict):
            node[leaf] = grown.get("init_range")
    actors = section(params, "actor_params")
    ignored += [f"task.randomization_params.actor_params.{actor}" for actor in [*actors][1:]]
    for actor in [*actors][:1]:
        params["actor_params"] = {"robot": section(actors, actor)}
    if params:
        draft.random["randomization_params"] = params
    return ignored


def fit_randomization(draft: Draft, scene: Scene) -> None:
    """Drop randomisation that MuJoCo or the robot does not support, with a note."""
    import torch

    from gpusim_rl.env.randomize import Randomizer
    from gpusim_rl.settings.compose import compose
    from gpusim_rl.sim import choose_sim, make_sim

    cfg = build(SimConfig, plain(compose(["task=Cartpole"]))["sim"], "sim")
    sim = make_sim(scene, choose_sim("mujoco", torch.device("cpu")), 1, cfg)

    def possible(params: dict[str, Any]) -> bool:
        logging.disable(logging.WARNING)  # hide warnings about settings without effect
        try:
            Randomizer(params, sim, num_actions=1, dt=0.01, clip_actions=1.0, seed=0)
        except (ConfigError, TaskError):
            return False
        finally:
            logging.disable(logging.NOTSET)
        return True

    params, kept, left = section(draft.random, "randomization_params"), dict[str, Any](), list[str]()
    for path, value in isaacgymenvs.randomized_properties(params):
        piece: Any = value
        for key in reversed(path):
            piece = {key: piece}
        if possible({"latency": {"range": [0, 0]}} | piece):
            kept = merge(kept, piece)
        else:
            left.append(".".join(path))
    if left:
        draft.notes.append(f"not randomised, because MuJoCo or the robot lacks them: {', '.join(left)}")
    if draft.random.get("randomize") and not possible(kept):
        draft.random["randomize"] = False
        draft.notes.append("task.randomize is false: nothing can be randomised")
    if params:
        draft.random["randomization_params"] = kept


def take_ppo(draft: Draft, file: Path, name: str) -> None:
    """Read the PPO settings of a task's yaml or, if there are none, of its base task."""
    from gpusim_rl.settings.compose import compose

    folder = file.parent.parent / "train"
    other, algorithm = folder / f"{file.stem}.yaml", folder / f"{file.stem}PPO.yaml"
    if not algorithm.is_file() and other.is_file():  # e.g. AntSAC
        draft.notes.append(f"ignored {other}: not PPO; algo=ppo, sac and td3 keep our defaults")
        return
    if not algorithm.is_file() and (of_base := folder / f"{name}PPO.yaml").is_file():
        draft.notes.append(f"PPO settings from {of_base.name}, because {algorithm.name} does not exist")
        algorithm = of_base
    if not algorithm.is_file():
        draft.notes.append(f"no PPO settings: {algorithm} does not exist")
        return
    params = section(isaacgymenvs.read_settings(algorithm), "params")
    whole = plain(compose(["task=Cartpole"]))["ppo"]

    def taken(path: str, value: Any) -> bool:
        nonlocal whole
        if path == "config.mixed_precision":
            value = "bf16" if value is True else "fp32"
        elif path.endswith(".fixed_sigma"):
            value = not value if isinstance(value, bool) else value
        elif path == "config.grad_norm" and look_up(params, "config.truncate_grads") is False:
            value = None
        elif isinstance(value, str):
            value = isaacgymenvs.WORDS.get(value, value)
        key = isaacgymenvs.ppo_key(path)
        if not key:
            return path in isaacgymenvs.SILENT
        above, _, leaf = key.rpartition(".")
        tried = whole | ({above: whole[above] | {leaf: value}} if above else {leaf: value})
        try:
            build(PPOConfig, tried, "ppo")
        except ConfigError:
            return False
        whole = tried
        (draft.ppo.setdefault(above, {}) if above else draft.ppo)[leaf] = value
        return True

    def ignored(values: dict[str, Any], above: str = "") -> list[str]:
        """Return the paths of ignored settings; a section stands for its contents if all of them are ignored."""
        found = []
        for key, value in values.items():
            path = f"{above}{key}"
            if isinstance(value, dict):
                inner = ignored(value, f"{path}.")
                found += [path] if above and inner and {*inner} == {f"{path}.{name}" for name in value} else inner
            elif not taken(path, value):
                found.append(path)
        return found

    left = ignored(params)
    for path, place, key in (("max_epochs", draft.common, "max_iterations"), ("save_frequency", draft.log, None)):
        value = look_up(params, f"config.{path}")
        if is_number(value) and 1 <= value < isaacgymenvs.LARGEST:
            place[key or "checkpoint_interval"] = round(value)
    if left:
        draft.notes.append(f"ignored in {algorithm.name}: {', '.join(left)}")


def copy_of_robot(draft: Draft, robot: RobotFacts) -> dict[Path, bytes]:
    """Return MJCF, meshes and textures of the robot by path, to write next to the task."""
    from gpusim_rl.export.scene_file import SCENE, write_scene
    from gpusim_rl.sim.robot_file import read_robot

    source: Any = draft.robot
    if draft.robot.endswith(".xml"):
        source = read_spec(draft.robot, [])
        add_missing_materials(source)
    spec, _ = read_robot(source, None, "home" if robot.keyframe else None, draft.fixed_base)
    for one, two in sorted(robot.inside):
        spec.add_exclude(bodyname1=one, bodyname2=two)
    body_of = {geom.name: geom.parent.name for geom in spec.geoms}
    for pair in list(spec.pairs):  # excludes do not affect pairs
        if {body_of.get(pair.geomname1), body_of.get(pair.geomname2)} in [{*each} for each in robot.inside]:
            spec.delete(pair)
    if robot.inside:
        count = len(robot.inside)
        draft.notes.append(f"{count} pairs of the robot's bodies overlap at the start: their collisions are disabled")
    folder, name = draft.folder / "my_tasks" / "assets" / draft.module, f"{draft.module}.xml"
    with tempfile.TemporaryDirectory() as scratch:
        try:
            write_scene(spec, Path(scratch))
        except ConfigError as error:
            draft.notes.append(f"the robot was not copied: {error}")
            return {}
        draft.robot, draft.free_base, robot.keyframe = str(folder / name), None, False  # the copied file has these
        return {
            folder / (name if path.name == SCENE else path.relative_to(scratch)): path.read_bytes()
            for path in sorted(Path(scratch).rglob("*"))
            if path.is_file()
        }


@dataclass(kw_only=True)
class RobotFacts:
    """Facts about the robot that the generated class depends on."""

    free: bool  # whether its base is free
    joints: list[str]
    unit: str  # unit of joint positions
    driven: list[str]  # the joint of each actuator, or all joints if an actuator drives no joint
    servos: bool  # whether every control is a joint position target
    actuators: int
    gains: dict[str, tuple[float, float]]  # stiffness, damping by pattern of `driven`; empty if the file has actuators
    has_ground: bool
    keyframe: bool  # whether the file has the keyframe `home`
    height: float  # height of the first body in the world [m]
    lift: float  # height to add to put the robot above the ground [m]
    inside: list[tuple[str, str]]  # pairs of bodies that overlap at the start
    physics_hz: float | int


def load_robot(draft: Draft, source: str) -> RobotFacts:
    """Load the robot from a file or MuJoCo Menagerie.

    Raises:
        TaskError: The scene cannot load the robot, or no joint can be driven.
    """
    import mujoco

    from gpusim_rl.sim import Scene
    from gpusim_rl.sim.keyframe import usable
    from gpusim_rl.sim.urdf import is_urdf

    spec = None
    if not draft.from_menagerie and source.endswith(".xml"):
        spec = read_spec(source, draft.notes if draft.values_of else None)
        if lacking := add_missing_materials(spec) if draft.values_of else []:
            draft.notes.append(f"{draft.robot} lacks the materials {', '.join(lacking)}; they are white in the task")
    if spec is not None and not 1e-6 <= spec.option.timestep <= 1.0:
        raise TaskError(key=f"{draft.robot}: timestep", expected="1e-6 to 1 s", got=spec.option.timestep)
    physics_hz = 200 if spec is None else number(1 / spec.option.timestep)
    keyframe = spec is not None and usable(spec, "home")
    scene = Scene(500)
    robot: Any = spec if draft.values_of and spec is not None else source
    scene.add("robot", robot, keyframe="home" if keyframe else None, fixed_base=draft.fixed_base)
    model = scene.model
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    bodies = scene.bodies_of("robot")
    if not bodies:
        raise TaskError("the file defines no bodies", key=draft.robot)
    kinds = {i: mujoco.mjtJoint(model.jnt_type[i]) for i in range(model.njnt) if model.jnt_bodyid[i] in bodies}
    free = mujoco.mjtJoint.mjJNT_FREE in kinds.values()
    hinge, slide = mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE
    moving = [i for i, kind in kinds.items() if kind in (hinge, slide)]
    names = {i: model.joint(i).name.removeprefix("robot/") for i in moving}
    if other := [joint for joint in draft.pose if joint not in names.values()]:
        draft.notes.append(f"ignored in {draft.values_of}: the robot has no joint {', '.join(other)}")
        for joint in other:
            del draft.pose[joint]
    for i, name in names.items():
        data.qpos[model.jnt_qposadr[i]] = draft.pose.get(name, data.qpos[model.jnt_qposadr[i]])
    mujoco.mj_kinematics(model, data)
    lowest, inside = start_poses(model, data, bodies, moving)
    lift = math.ceil(100 * max(0.0, -lowest)) / 100
    if draft.height is not None and free:
        lift = max(lift, round(draft.height - float(data.xpos[bodies[0], 2]), 4))
    height = float(data.xpos[bodies[0], 2]) + lift
    if not free and draft.free_base is None and is_urdf(Path(source)):
        draft.notes.append("the robot's base is fixed, because URDF has no free joints; change it with --free-base")
    of_joint = [
        model.actuator_trnid[a, 0]
        for a in range(model.nactuator)
        if model.actuator_trntype[a] == mujoco.mjtTrn.mjTRN_JOINT.value
    ]
    driven = [i for i in of_joint if i in moving]
    gains: dict[str, tuple[float, float]] = {}
    if model.nu == 0:
        followers = {model.eq_obj1id[e] for e in range(model.neq) if model.eq_type[e] == mujoco.mjtEq.mjEQ_JOINT.value}
        driven = [i for i in moving if i not in followers]
        for i in driven:
            guess = usual_gains(model, data, i, height if free else None)
            gains[escape(names[i])] = draft.gains.get("stiffness", guess[0]), draft.gains.get("damping", guess[1])
    if not driven and not moving:
        raise TaskError("the robot has no joint that an actuator could move", key=draft.robot)
    one_each = len(driven) >= model.nu  # every actuator drives a joint
    servos = one_each and all(
        model.actuator_biastype[a] == mujoco.mjtBias.mjBIAS_AFFINE.value
        and model.actuator_biasprm[a, 1] == -model.actuator_gainprm[a, 0] != 0
        for a in range(model.nactuator)
    )
    if draft.random:
        if gains:
            stiffness, damping = ({name: pair[i] for name, pair in gains.items()} for i in (0, 1))
            scene.add_actuators("robot", [*gains], kind="position", stiffness=stiffness, damping=damping)
        fit_randomization(draft, scene)
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
        inside=[(model.body(one).name[len("robot/") :], model.body(two).name[len("robot/") :]) for one, two in inside],
        physics_hz=physics_hz,
    )


def read_spec(file: str, notes: list[str] | None = None) -> mujoco.MjSpec:
    """Read an MJCF file; errors are one line. With `notes`, drop attributes that MuJoCo no longer supports."""
    from gpusim_rl.sim.robot_file import one_line
    from gpusim_rl.sim.robot_xml import read_mjcf

    try:
        return read_mjcf(Path(file))
    except ValueError as error:
        if notes is None or not OBSOLETE.search(str(error)):
            raise TaskError(one_line(error), key=file) from None
        return read_old_spec(Path(file), notes)


def read_old_spec(file: Path, notes: list[str]) -> mujoco.MjSpec:
    """Read an MJCF file written for an older MuJoCo, without the attributes that MuJoCo no longer supports."""
    import mujoco

    from gpusim_rl.sim.robot_file import one_line
    from gpusim_rl.sim.robot_xml import check_assets, included_files

    folder = file.parent.resolve()
    texts = {os.path.relpath(path, folder): path.read_bytes() for path in included_files(file)}
    for _ in range(20):
        try:
            spec = mujoco.MjSpec.from_string(texts[file.resolve().name].decode(), include=texts)
            spec.meshdir, spec.texturedir = (str(folder / each) for each in (spec.meshdir, spec.texturedir))
            check_assets(spec)
        except ValueError as error:
            if (found := OBSOLETE.search(str(error))) is None:
                raise TaskError(one_line(error), key=str(file)) from None
            attribute, element = found.groups()
            notes.append(f"{file}: removed {attribute!r} of <{element}>, which MuJoCo no longer supports")
            pattern = rf"(<{element}\b[^<>]*?)\s{attribute}\s*=\s*(\"[^\"]*\"|'[^']*')".encode()
            texts = {name: re.sub(pattern, rb"\1", text) for name, text in texts.items()}
        else:
            return spec
    raise TaskError("contains more than 20 attributes that MuJoCo does not support", key=str(file))


def add_missing_materials(spec: mujoco.MjSpec) -> list[str]:
    """Add materials that geoms reference but the file lacks (IsaacGym ignores them); return their names."""
    lacking = {geom.material: None for geom in spec.geoms if geom.material and spec.material(geom.material) is None}
    for name in lacking:
        spec.add_material(name=name)
    return [*lacking]


def start_poses(
    model: mujoco.MjModel, data: mujoco.MjData, bodies: list[int], joints: list[int]
) -> tuple[float, set[tuple[int, int]]]:
    """Find the lowest point and overlapping bodies over random initial poses.

    Returns:
        Height of the robot's lowest point [m], 0 without geoms, and the pairs of its bodies that overlap.
    """
    import mujoco
    import numpy as np

    addresses = [model.jnt_qposadr[i] for i in joints]
    random, pose, lowest = np.random.default_rng(0), data.qpos.copy(), math.inf
    inside: set[tuple[int, int]] = set()
    limits = np.where(model.jnt_limited[joints], model.jnt_range[joints].T, [[-math.inf], [math.inf]])
    for trial in range(256):
        noise = random.uniform(-1, 1, len(addresses))
        corner = trial >= 64  # extreme noise, where bodies overlap most
        noise = NOISE * (np.sign(noise) if corner else noise)
        data.qpos[addresses] = np.clip(pose[addresses] + noise, *limits)
        mujoco.mj_fwdPosition(model, data)
        for i in range(0 if corner else model.ngeom):
            if model.geom_bodyid[i] in bodies:
                middle, half = model.geom_aabb[i, :3], model.geom_aabb[i, 3:]
                turned = data.geom_xmat[i].reshape(3, 3)
                lowest = min(lowest, float((data.geom_xpos[i] + turned @ middle)[2] - (np.abs(turned) @ half)[2]))
        pairs = [model.geom_bodyid[contact.geom].tolist() for contact in data.contact if contact.dist < 0.0]
        inside |= {(min(pair), max(pair)) for pair in pairs if {*pair} <= {*bodies}}
    data.qpos[:] = pose
    mujoco.mj_forward(model, data)
    return lowest if math.isfinite(lowest) else 0.0, inside


def usual_gains(model: mujoco.MjModel, data: mujoco.MjData, joint: int, height: float | None) -> tuple[float, float]:
    """Guess stiffness and damping of a joint (SI units) so that the joints hold the robot up.

    On a fixed base, a joint responds at 3 Hz, critically damped, and sags by at most 0.1 rad (1 cm for a slide joint)
    under its load. Legs carry the robot: with a stiffness of 1.2 x weight x height, a quadruped stands still; with
    half of that, it tips over.
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


def own_settings(draft: Draft, robot: RobotFacts) -> dict[str, tuple[Any, str]]:
    """Return the task's own settings, each with a comment."""
    values: dict[str, tuple[Any, str]] = {"start_noise": (NOISE, "rad or m, joint noise at the start")}
    if robot.free:
        values["speed"] = (1.0, "m/s, maximum rewarded velocity")
        values["alive_reward"] = (0.5, "per step")
        values["least_height"] = (rounded(0.5 * robot.height), "m, minimum height of the first body")
        values["least_upright"] = (0.5, "minimum cosine of its tilt")
        if robot.servos:
            values["reach"] = (0.5, "rad or m, from the joints' start to their targets at action 1")
    else:
        values["reach"] = (1.0, "rad or m, maximum distance of targets from the start; at most half the joint range")
    values["action_cost"] = (0.01, "x mean squared action")
    control = draft.values.get("control", ({}, ""))[0]
    if robot.servos and is_number(scale := look_up(control, "action_scale")):
        values["reach"] = scale, values["reach"][1]
        del control["action_scale"]
    if robot.gains:
        for key in draft.gains:
            del control[key]
        values["stiffness"] = ({joint: gains[0] for joint, gains in robot.gains.items()}, "N m/rad or N/m")
        values["damping"] = ({joint: gains[1] for joint, gains in robot.gains.items()}, "N m s/rad or N s/m")
    theirs = {key: value for key, value in draft.values.items() if key not in values and value[0] != {}}
    if unused := [key for key in theirs if key != "default_joint_angles"]:
        draft.notes.insert(0, f"copied from {draft.values_of}, not yet used by the class: {', '.join(unused)}")
    if doubles := [key for key in draft.values if key in values]:
        draft.notes.append(f"ignored in {draft.values_of}, already defined by the class: {', '.join(doubles)}")
    return values | theirs


def class_text(draft: Draft, robot: RobotFacts, values: Mapping[str, tuple[Any, str]]) -> str:
    """Return the content of the Python file."""
    if robot.gains and len(draft.gains) < 2:
        draft.notes.append("the robot has no actuators: the yaml adds position drives; tune their gains")
    items = [f"{literal(name)}: {from_task(draft, folder)}" for name, folder in draft.packages.items()]
    packages = f"{{{', '.join(items)}}}" if items else ""
    fields = {key: task_text.type_of(value) for key, (value, _) in values.items()}
    shared = {"draft": draft, "robot": robot, "doing": DOING[robot.free], "place": robot_place(draft)}
    return render(TEMPLATES, "task.py", **shared, fields=fields, packages=packages)


def robot_place(draft: Draft) -> str:
    """Return the Python expression for the robot's file."""
    if draft.from_menagerie:
        return literal(draft.robot)
    return from_task(draft, Path(draft.robot))


def from_task(draft: Draft, path: Path) -> str:
    """Return the Python expression for a path relative to the Python file."""
    relative = os.path.relpath(path.resolve(), (draft.folder / "my_tasks").resolve())
    return f"Path(__file__).parent / {literal(Path(relative).as_posix())}"


def yaml_text(draft: Draft, robot: RobotFacts, values: Mapping[str, tuple[Any, str]]) -> str:
    """Return the content of the yaml."""
    common = {"physics_hz": robot.physics_hz, "control_hz": 50, "clip_actions": 1.0, "clip_observations": None}
    common |= {"num_envs": 1024, "max_iterations": 300 if robot.free else 100, **draft.common}
    physics_hz = common["physics_hz"]
    common["control_hz"] = number(physics_hz / max(1, round(physics_hz / common["control_hz"])))
    common.setdefault("episode_length", round((10 if robot.free else 3) * common["control_hz"]))
    ppo = draft.ppo or {"horizon": 24, "epochs": 5, "minibatch_size": 6144, "network": {"hidden": [128, 64]}}
    return render(TEMPLATES, "task.yaml", draft=draft, doing=DOING[robot.free], values=values, ppo=ppo, **common)


def velocity_texts(draft: Draft, feet: list[str]) -> tuple[str, str]:
    """Return the contents of the Python file and of the yaml for a robot that tracks commanded velocities."""
    from gpusim_rl.sim import Scene
    from gpusim_rl.sim.keyframe import usable
    from gpusim_rl.sim.mirror_image import MirrorImage
    from gpusim_rl.sim.urdf import is_urdf

    scene, keys, degrees = Scene(200), [], False
    urdf = not draft.from_menagerie and is_urdf(Path(draft.robot))
    free = draft.free_base or urdf  # URDF has no free joints
    if urdf and not draft.free_base:
        draft.notes.append("the robot's base is free, as with --free-base, because walking needs it")
    if not urdf and not draft.from_menagerie:
        spec = read_spec(draft.robot)
        keys, degrees = [key.name for key in spec.keys if key.name], bool(spec.compiler.degree)
        keys = [key for key in keys if usable(spec, key)]
    stance = next((key for word in ("home", "stand", "") for key in keys if word in key), None)
    scene.add("robot", draft.robot, keyframe=stance, fixed_base=False if free else None)
    try:
        robot = read_robot(scene, feet, degrees)
    except TaskError as error:
        raise error.within(draft.robot) from None
    draft.notes += robot.notes

    def code(values: Mapping[str, Any]) -> dict[str, str]:
        return {name: literal(value) for name, value in values.items()}

    mirrored = True
    try:
        MirrorImage(scene, "robot").measure()
    except TaskError as error:
        draft.notes.append(f"the task has no mirror images: {error}")
        mirrored = False
    joints, biped = list(robot.pose), len(robot.feet) == 2
    sites = {f"{foot.item.partition(':')[2]}_sole": literal((foot.body, foot.sole)) for foot in robot.feet}
    if robot.imu is None:
        sites["imu"] = literal((robot.root, (0.0, 0.0, 0.0)))
    pose = {joint: value for joint, value in robot.pose.items() if value}
    motors = {
        joint: f"Motor.tuned(armature={literal(armature)}, effort={literal(effort)}"
        + (f", scale={literal(robot.scales[joint])})" if joint in robot.scales else ")")
        for joint, (armature, effort) in robot.motors.items()
    }
    widths = dict.fromkeys(robot.pitches, (0.05, 0.3, 0.5) if biped else (0.05, 0.3, 0.3))
    widths |= dict.fromkeys(robot.knees, (0.05, 0.35, 0.6) if biped else (0.1, 0.6, 0.6))
    others = {"*": (0.05, 0.15, 0.2) if biped else (0.05, 0.3, 0.3)}
    arguments = {
        "root": literal(robot.root),
        "torso": literal(robot.torso),
        "imu": literal(robot.imu or "imu"),
        "feet": literal(tuple(foot.item for foot in robot.feet)),
        "soles": literal(tuple(f"{foot.item.partition(':')[2]}_sole" for foot in robot.feet)),
        "height": literal(robot.height),
        "pose": code(by_pattern(joints, pose)),
        "motors": by_pattern(joints, motors),
        "widths": code({**by_pattern(joints, widths), **others}),
        "trot": literal(robot.trot) if not biped else "",
        "elliptic": "True" if not biped else "",
        "fixed_base": "False" if free else "",
        "sites": sites,
        "packages": {name: from_task(draft, folder) for name, folder in draft.packages.items()} or "",
    }
    shared = {"draft": draft, "robot": robot, "mirrored": mirrored}
    source = render(TEMPLATES, "velocity.py", **shared, place=robot_place(draft), arguments=arguments)
    feet = [*dict.fromkeys(foot.body for foot in robot.feet)]
    return source, render(
        TEMPLATES, "velocity.yaml", **shared, feet=feet, base="G1Velocity" if biped else "Go1Velocity"
    )


def read_robot(scene: Scene, feet: list[str], degrees: bool) -> LeggedRobot:
    """Read a legged robot; if the file uses degrees, warn about leg joints with a tiny range."""
    import mujoco

    from gpusim_rl.sim.legged import read_legged

    model, bodies, limbs = scene.model, scene.elements_of("robot", "body"), dict[int, list[int]]()
    for i in bodies.values():  # parents come first
        moving = int(model.body_weldid[i])
        above = limbs.get(int(model.body_parentid[moving]))
        limbs[i] = [] if above is None else [*above, moving]  # moving bodies from the root to the body
    inner = {i for limb in limbs.values() for i in limb[:-1]}
    ends = [body for body, i in bodies.items() if i in limbs[i] and i not in inner]
    if len(ends) < 2:
        raise TaskError("the robot has fewer than two limbs to stand on", hint="Try without --velocity")
    robot = read_legged(scene, "robot", feet)
    legs = {foot.item.partition(":")[2]: {*limbs[bodies[foot.body]]} for foot in robot.feet}
    wrong = [f", unlike {one!r}" for one in legs for two in legs if one != two and legs[one] <= legs[two]]
    if feet and (wrong or len(legs) < 2):
        expected = f"two or more feet, each on its own limb{''.join(wrong[:1])}"
        raise TaskError(key=f"--feet {','.join(feet)}", expected=expected, hint=f"Try two or more of {ends}")
    narrow = [
        f"{joint} from {math.degrees(low):.3g} to {math.degrees(high):.3g} degrees"
        for joint, j in scene.elements_of("robot", "joint").items()
        for low, high in [model.jnt_range[j]]
        if 0 < high - low < NARROW and model.jnt_type[j] == mujoco.mjtJoint.mjJNT_HINGE
        if any(model.jnt_bodyid[j] in leg for leg in legs.values())
    ]
    if degrees and narrow:
        fix = 'if these are radians, add <compiler angle="radian"/> to the file'
        warn(f"{len(narrow)} leg joints have a tiny range: {narrow[0]}; {fix}")
    return robot


if __name__ == "__main__":
    sys.exit(main())
