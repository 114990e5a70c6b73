"""mjlab's velocity tasks as `gpusim_rl.tasks.velocity` has them, and velocity commands of both libraries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpusim_rl.connect.manager_cfg import LibraryTask, Term
from gpusim_rl.connect.task_skeleton import RobotElements, yaml_text
from gpusim_rl.connect.task_text import by_pattern, velocity_source

WEIGHTS = {"track_linear_velocity": "lin_vel", "track_angular_velocity": "ang_vel", "upright": "upright"}
WEIGHTS |= {"variable_posture": "pose", "joint_pos_limits": "joint_limits", "action_rate_l2": "action_rate"}
WEIGHTS |= {"feet_clearance": "foot_clearance", "feet_swing_height": "swing_height", "feet_slip": "foot_slip"}
WEIGHTS |= {"soft_landing": "soft_landing", "feet_air_time": "air_time", "self_collision_cost": "self_contact"}
WEIGHTS |= {"body_angular_velocity_penalty": "torso_ang_vel", "angular_momentum_penalty": "angular_momentum"}
"""Our names of their reward terms."""
HITS = {"self": "self_contact", "shank": "shank_contact", "trunk": "trunk_contact"}
"""Our names of `self_collision_cost`, by a word in the name of its sensor."""
FIXED = {"command_threshold": 0.05, "walking_threshold": 0.05, "running_threshold": 1.5}
FIXED |= {"threshold_min": 0.05, "threshold_max": 0.5, "force_threshold": 10.0}
"""Parameters that are constants of `VelocityTask`."""
PARTS = {"base_lin_vel": "lin_vel", "base_ang_vel": "ang_vel", "projected_gravity": "gravity", "joint_pos": "joint_pos"}
PARTS |= {"joint_vel": "joint_vel", "actions": "actions", "command": "command", "height_scan": "heights"}
"""Our names of the parts of the policy's observation."""
EVENTS = {"reset_root_state_uniform", "reset_joints_by_offset", "push_by_setting_velocity", "encoder_bias"}
DRAWN = {"body_com_offset", "geom_friction"}
UNKNOWN = ("rel_world_envs", "init_velocity_prob", "vel_xy_success_threshold", "vel_yaw_success_threshold")
"""Settings of a velocity command that `VelocityCommand` has not."""
AXES = ("x", "y", "z", "roll", "pitch", "yaw")
OURS = ("scene.sensors", "scene.terrain", "curriculum.command_vel", "curriculum.terrain_levels")
"""What `VelocityTask` has, by its place there."""


def is_velocity_task(task: LibraryTask) -> bool:
    """Whether all terms of a task of mjlab are those of its own velocity tasks."""
    commands = [term.func for term in task.terms["commands"]]
    rewards, events = ({term.known_as for term in task.terms[key]} for key in ("rewards", "events"))
    own = commands == ["mjlab.tasks.velocity.mdp.velocity_command.UniformVelocityCommandCfg"]
    return own and rewards <= WEIGHTS.keys() and events <= EVENTS | DRAWN


def velocity_task(
    task: LibraryTask, robot: RobotElements, names: Mapping[str, str], places: Mapping[str, str]
) -> tuple[str, str, list[str]]:
    """Returns the content of the py file and of the yaml, and lines for the user; see `task_texts`."""
    sensors: dict[str, dict[str, Any]] = {}
    for path, value in task.left.items():
        if path.startswith("scene.sensors.") and path.count(".") > 2:
            sensors.setdefault(path.split(".")[2], {})[path.split(".", 3)[3]] = value
    command = command_settings(task.terms["commands"][0], task.left)
    rough = "scene.terrain.terrain_type" in task.left
    task.left = {key: value for key, value in task.left.items() if not key.startswith(OURS)}
    if rough:
        task.left["scene.terrain"] = "patches are those of cfg/task/Go1Velocity.yaml, which are mjlab's own"
    rewards = {term.known_as: term.params for term in task.terms["rewards"]}
    events = {term.known_as: term for term in task.terms["events"]}
    for term in task.terms["rewards"]:
        own = {"command_threshold"} if term.known_as == "feet_air_time" else set()
        for key in FIXED.keys() & term.params.keys() - own:
            if term.params[key] != FIXED[key]:
                task.left[f"rewards.{term.name}.{key}"] = f"{term.params[key]:g}, here {FIXED[key]:g}"
    joints, soles = robot.names["joint"], rewards["feet_clearance"]["asset_cfg"]["site_names"]
    gaits = ("standing", "walking", "running")
    widths = [robot.by_joint(rewards["variable_posture"].get(f"std_{gait}", {}), joints) for gait in gaits]
    scale = robot.by_joint(task.terms["actions"][0].params.get("scale", 1.0), joints)
    motors: dict[str, str] = {}
    for drive in task.drives:
        numbers = {"armature": "armature", "effort": "effort_limit", "stiffness": "stiffness", "damping": "damping"}
        words = [f"{ours}={drive.get(theirs, 0.0):.7g}" for ours, theirs in numbers.items()]
        for joint in robot.matching(drive["joints"]):
            motors[joint] = f"Motor({', '.join([*words, f'scale={scale[joint]:.7g}'])})"
    pose = {joint: value for joint, value in robot.by_joint(task.pose, joints).items() if value}
    ring = {key.rpartition(".")[2]: value for key, value in sensors.get("foot_height_scan", {}).items()}
    imu = [str(term.params.get("sensor_name")).partition("/")[2] for term in task.groups["policy"]]
    sites = [robot.model.site(int(robot.model.sensor(f"robot/{sensor}").objid[0])) for sensor in imu if sensor]
    torso = (rewards["upright"].get("asset_cfg") or {}).get("body_names") or robot.names["body"]
    values = {
        "root": json.dumps(robot.names["body"][0]),
        "torso": json.dumps(torso[0]),
        "imu": json.dumps(sites[0].name.removeprefix("robot/") if sites else "imu"),
        "feet": _touched(robot, sensors.get("feet_ground_contact", {})),
        "soles": tuple(soles),
        "height": f"{task.root[0][2]:g}",
        "pose": by_pattern(joints, pose, 0.0),
        "motors": by_pattern(joints, motors, 0.0),
        "widths": by_pattern(joints, {joint: tuple(each[joint] for each in widths) for joint in joints}, 0.0),
        "foot_ring": f"({ring['radius']:g}, {ring['num_samples']})" if "radius" in ring else "",
        "thighs": _touched(robot, sensors.get("thigh_ground_touch", {})),
        "shanks": _touched(robot, sensors.get("shank_ground_touch", {})),
        "elliptic": "True" if task.option.get("cone") == "elliptic" else "",
    }
    weights, hits = {"trot": 0.0, "air_time": 0.0}, dict[str, float]()
    for term in task.terms["rewards"]:
        sensor = str(term.params.get("sensor_name"))
        hit = next((ours for word, ours in HITS.items() if word in sensor), "self_contact")
        to, key = (hits, hit) if term.known_as == "self_collision_cost" else (weights, WEIGHTS[term.known_as])
        to[key] = float(term.more.get("weight", 0.0))
    limits = [term.params["limit_angle"] for term in task.terms["terminations"] if "limit_angle" in term.params]
    stds = {key: round(rewards[f"track_{key}"]["std"] ** 2, 6) for key in ("linear_velocity", "angular_velocity")}
    start = events["reset_root_state_uniform"].params["pose_range"]
    yaml: dict[str, tuple[Any, str]] = {
        "terrain": ("rough" if rough else "flat", ""),
        "command": (command, ""),
        "pushes": ("push_by_setting_velocity" in events, ""),
        "weights": (weights if rough else weights | hits, "per second"),
        "rough_weights": (dict.fromkeys(HITS.values(), 0.0) | hits, ""),
        "lin_vel_width": (stds["linear_velocity"], "m2/s2"),
        "ang_vel_width": (stds["angular_velocity"], "rad2/s2"),
        "upright_width": (round(rewards["upright"]["std"] ** 2, 6), ""),
        "swing_height": (rewards["feet_swing_height"]["target_height"], "m"),
        "encoder_bias": (events["encoder_bias"].params["bias_range"][1] if "encoder_bias" in events else 0.0, "rad"),
        "tilt_limit": (next(iter(limits), 1.2217), "rad"),
        "start_height": (start.get("z", [0.0, 0.0]), "m above the robot's own height"),
    }
    if push := events.get("push_by_setting_velocity"):
        most = [push.params["velocity_range"].get(axis, [0.0, 0.0])[1] for axis in AXES]
        yaml["push"] = ({"interval": push.more["interval_range_s"], "lin_vel": most[:3], "ang_vel": most[3:]}, "")
    noise = {term.name: term.more.get("noise") or {} for term in task.groups["policy"] if term.name in PARTS}
    bounds = {PARTS[key]: {"noise": [each["n_min"], each["n_max"]]} for key, each in noise.items() if "n_min" in each}
    yaml["observations"] = (bounds, "bounds of uniform noise")
    for term in task.terms["events"]:
        if term.known_as in DRAWN:
            task.left[f"events.{term.name}"] = term.params
    head = "# What is not here is in cfg/task/Go1Velocity.yaml, and the class in tasks/velocity.py.\n"
    head += "defaults: [Go1Velocity]\n"
    text, left = yaml_text(task, robot, yaml, names, head, {"symmetry": {"augment": False}})
    source = velocity_source(
        values,
        len(joints),
        recipe=f"It is made from {task.source}.",
        scale="the motor's `scale`",
        mirrors="",
        name=names["name"],
        import_path="\nfrom pathlib import Path\n" if "Path(" in places["robot"] else "",
        robot_name=names["module"],
        robot=places["robot"],
    )
    return source, text, ["all terms are written: it is a VelocityTask, as Go1Velocity", *left]


def command_settings(term: Term, left: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of `VelocityCommand` for a uniform command of theirs.

    Args:
        term: Their command.
        left: What was not read. Mjlab's curriculum of the ranges is taken from it, and what ours has not is added.
    """
    params, ranges = term.params, term.params.get("ranges") or {}
    names = {"lin_vel_x": "x", "lin_vel_y": "y", "ang_vel_z": "yaw", "step": "steps"}
    stages: dict[int, dict[str, Any]] = {}
    for path in [path for path in left if ".velocity_stages." in path]:
        place, _, key = path.partition(".velocity_stages.")[2].partition(".")
        stages.setdefault(int(place), {})[names[key]] = left.pop(path)
    left |= {f"commands.{term.name}.{key}": params[key] for key in UNKNOWN if params.get(key)}
    return {
        **{names[theirs]: ranges.get(theirs, [0.0, 0.0]) for theirs in ("lin_vel_x", "lin_vel_y", "ang_vel_z")},
        "interval": params.get("resampling_time_range", [10.0, 10.0]),
        "standing": params.get("rel_standing_envs", 0.0),
        "heading": params.get("rel_heading_envs", 1.0) if params.get("heading_command") else 0.0,
        "forward": params.get("rel_forward_envs", 0.0),
        "heading_gain": params.get("heading_control_stiffness", 1.0),
        "stages": [stages[key] for key in sorted(stages) if stages[key].get("steps")],
        "stage_error": None,
    }


def _touched(robot: RobotElements, sensor: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns what a contact sensor of theirs is of, in our names."""
    patterns, kind = sensor.get("primary.pattern", []), "geom" if sensor.get("primary.mode") == "geom" else "body"
    return tuple(f"{kind}:{name}" for name in (robot.matching(patterns, kind) if patterns else []))
