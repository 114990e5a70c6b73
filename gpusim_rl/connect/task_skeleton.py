"""A task of ours from an env of Isaac Lab or mjlab: its numbers, and zeros for terms that are to be written."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Any

import mujoco

from gpusim_rl.connect.manager_cfg import DRIVE, LibraryTask, Term, by_section
from gpusim_rl.connect.task_text import by_pattern, commented_yaml, number, type_of, wrapped
from gpusim_rl.errors import TaskError
from gpusim_rl.settings.checks import OTHERS, known_keys
from gpusim_rl.sim.scene import Scene

# fmt: off
SOURCE = '''\
"""$name: made from $source; terms that are not written yet are 0."""

from __future__ import annotations

from dataclasses import dataclass
${path}from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Parts, Task, TaskConfig
${math}from gpusim_rl.sim import Scene, Sim

$constants


@dataclass(frozen=True, slots=True, kw_only=True)
class ${name}Config(TaskConfig):
    """Values in my_cfg/task/$name.yaml."""

$fields


class $name(Task[${name}Config]):
    """$name: $source, as a start.

    To write:

$to_write

    Action space: $actions, for each of the joints in ACTED.

    Observation space: the parts in `observe`.

    Reward terms, x weight$per_second: those of `weights`. Start: the pose.
    """

    Config = ${name}Config

    @classmethod
    def scene(cls, cfg: ${name}Config) -> Scene:
$scene
        return scene

    def __init__(self, cfg: ${name}Config, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("robot")
        self.num_actions, names = len(ACTED), self.robot.joint_names
        self.acted = torch.tensor([names.index(name) for name in ACTED], device=self.device)
        self.driven = torch.tensor([names.index(name) for name in DRIVEN], device=self.device)
        self.pose = torch.tensor([cfg.pose.get(name, 0.0) for name in names], device=self.device)  # rad or m
$init

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        pose = self.pose.expand(self.num_envs, -1)
        self.robot.set_state(where, joint_pos=pose, joint_vel=torch.zeros_like(pose)$root)

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        target = self.pose.repeat(self.num_envs, 1)
        target[:, self.acted] $sign= self.action_scale * action
        self.robot.actuate(target[:, self.driven])

    def observe(self) -> dict[str, Parts]:
        robot = self.robot
$observe

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        zero = torch.zeros(self.num_envs, device=self.device)
        terms = {
$rewards
        }
        return {name: ${factor}self.cfg.weights[name] * term for name, term in terms.items()}

    def terminated(self) -> Bool[Tensor, " envs"]:
        return torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
'''
ROOT = """\
root = torch.tensor([*cfg.root_pos, *cfg.root_quat, *[0.0] * 6], device=self.device).expand(self.num_envs, 13)
parts = ("root_pos", "root_quat", "root_lin_vel", "root_ang_vel")
self.root = dict(zip(parts, root.split([3, 4, 3, 3], dim=1), strict=True))"""
DAMPING = """\
for joint, damping in cfg.joint_damping.items():
    scene.spec.joint(f"robot/{joint}").damping[0] = damping"""
YAML = """\
# @package _global_
# $name: made from $source.
${head}task:
  _target_: my_tasks.$module.$name
  physics_hz: $physics_hz  # Hz
  control_hz: $control_hz  # Hz
  episode_length: $episode_length  # control steps
  clip_actions: 100.0  # they do not clip them
  clip_observations: null
  randomize_episode_start: true
$values
num_envs: $num_envs
max_iterations: $max_iterations
ppo:
$ppo
$left"""
# fmt: on
KINDS = {"JointPositionActionCfg": "position", "JointEffortActionCfg": "torque"}
"""Kind of the drives, by the class of an action term."""
OBSERVATIONS = {
    "joint_pos": "robot.joint_pos",
    "joint_pos_rel": "robot.joint_pos - self.pose",
    "joint_vel": "robot.joint_vel",
    "joint_vel_rel": "robot.joint_vel",
    "last_action": "self.actions",
    "base_lin_vel": "quat_rotate_inverse(robot.root_quat, robot.root_lin_vel)",
    "base_ang_vel": "robot.root_ang_vel_local",
    "projected_gravity": "quat_rotate_inverse(robot.root_quat, self.down)",
}
"""Code of observations that mean the same here."""
REWARDS = {"is_alive": "(~self.terminated()).float()", "is_terminated": "self.terminated().float()"}
"""Code of rewards that mean the same here."""
OURS = {"time_out", "nan_detection", "reset_scene_to_default"}
"""Terms that the framework has for all tasks."""
FIRST_GAINS = {"stiffness": 20.0, "damping": 0.5}  # of a drive whose model has none: a guess


class RobotElements:
    """Names in the file of a robot, matched with regular expressions of theirs.

    Args:
        robot: The file, or a robot of MuJoCo Menagerie.
        renamed: What names of the file contain, by what theirs have in its place.

    Attributes:
        names: Names by kind: `joint` (hinges and slides), `body` (the root is the first), `geom`.
        actuators: The joint of each actuator of the file.
        free: Whether the root moves freely.
        unmatched: Patterns of theirs that match no name.
        model: The robot alone.
    """

    def __init__(self, robot: str | Path, renamed: Mapping[str, str]) -> None:
        scene = Scene(500)
        scene.add("robot", robot)
        self.model, self._renamed, self.unmatched = scene.model, renamed, dict[str, None]()
        self.names = {kind: [*scene.elements_of("robot", kind)] for kind in ("joint", "body")}
        self.names["geom"] = [scene.model.geom(i).name.removeprefix("robot/") for i in range(scene.model.ngeom)]
        self.actuators = [
            scene.model.joint(int(i)).name.removeprefix("robot/") for i in scene.model.actuator_trnid[:, 0]
        ]
        self.free = mujoco.mjtJoint.mjJNT_FREE.value in scene.model.jnt_type

    def matching(self, patterns: Any, kind: str = "joint") -> list[str]:
        """Returns the names that regular expressions of theirs match, in the order of the file."""
        theirs = {name: name for name in self.names[kind]}
        for their, our in self._renamed.items():
            theirs = {name: word.replace(our, their) for name, word in theirs.items()}
        found: set[str] = set()
        for pattern in [patterns] if isinstance(patterns, str) else patterns or [".*"]:
            hits = {name for name, word in theirs.items() if re.fullmatch(pattern, word)}
            if not hits:
                self.unmatched[f"{kind} {pattern!r}"] = None
            found |= hits
        return [name for name in theirs if name in found]

    def by_joint(self, value: Any, joints: Iterable[str]) -> dict[str, float]:
        """Returns numbers of those joints that have one, from one number or numbers by regular expression."""
        if not isinstance(value, Mapping):
            return {} if value is None else {joint: float(value) for joint in joints}
        found = {joint: float(f"{each:.9g}") for pattern, each in value.items() for joint in self.matching(pattern)}
        return {joint: found[joint] for joint in joints if joint in found}


def task_texts(
    task: LibraryTask, robot: RobotElements, names: Mapping[str, str], places: Mapping[str, str]
) -> tuple[str, str, list[str]]:
    """Returns the content of the py file and of the yaml, and lines for the user.

    Args:
        task: What the configuration says.
        robot: Names in the robot's file.
        names: `name` of the task and `module`, its py file.
        places: Expression of the file of the robot and of each object, by name.
    """
    to_write: list[str] = []
    terms: dict[str, Any] = {"soft_limit": task.soft_limit}

    def later(kind: str, term: Term) -> None:
        mode = f", {term.more['mode']}" if "mode" in term.more else ""
        to_write.append(f"{kind}.{term.name}{mode}: {term.func}")
        more = {key: value for key, value in term.more.items() if key not in ("mode", "weight")}
        if term.params | more:
            terms.setdefault(kind, {})[term.name] = term.params | more

    action = _action(task, later)
    params, kind = action.params, KINDS[action.func.rpartition(".")[2]]
    keep = bool(robot.actuators) and all(drive["model"].startswith("Xml") for drive in task.drives)
    driven = robot.matching([pattern for drive in task.drives for pattern in drive["joints"]])
    acted = robot.matching(params.get("joint_names") or params.get("actuator_names"))
    acted = robot.actuators if keep else [joint for joint in acted if joint in driven]
    if not acted:
        raise TaskError(f"no joint of the robot has a name that the action {action.name} has; try --names THEIRS=OURS")
    driven = driven if kind == "position" and not keep else acted
    scale = dict.fromkeys(acted, 1.0) | robot.by_joint(params.get("scale", 1.0), acted)
    same = len({*scale.values()}) == 1
    task.left |= {f"actions.{action.name}.{key}": params[key] for key in ("offset", "clip") if params.get(key)}
    values: dict[str, tuple[Any, str]] = {
        "pose": (robot.by_joint(task.pose, robot.names["joint"]), "rad or m, at the start"),
        "action_scale": (scale[acted[0]] if same else scale, ""),
    }
    floor = (robot.model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE.value).any()
    option = "".join(f", {key}={json.dumps(value)}" for key, value in task.option.items())
    scene = [f"scene = Scene(cfg.physics_hz{option})", *([] if floor else ["scene.add_ground()"])]
    scene.append(f'scene.add("robot", ROBOT{_place(task, robot)})')
    for key, each in task.objects.items():
        scene.append(f'scene.add("{key}", {_constant(key)}, pos={each["pos"]}, quat={each["quat"]})')
    if not keep:
        gains, damping = _gains(task, robot, driven, acted if kind == "position" else [], to_write)
        values["drives"] = (gains, "SI units")
        if robot.actuators:
            scene += ["for actuator in scene.spec.actuators:  # of the file", "    scene.spec.delete(actuator)"]
        scene.append(f'scene.add_actuators("robot", DRIVEN, kind="{kind}", **cfg.drives)')
        if damping:
            values["joint_damping"] = (damping, "N m s/rad or N s/m, of joints without a servo")
            scene += DAMPING.split("\n")
    scales = (
        "cfg.action_scale" if same else "torch.tensor([cfg.action_scale[name] for name in ACTED], device=self.device)"
    )
    init = [f"self.action_scale = {scales}"]
    if robot.free:
        values |= {"root_pos": (task.root[0], "m, at the start"), "root_quat": (task.root[1], "wxyz")}
        init += ROOT.split("\n")
    groups, settings, factors = _observations(task, robot, later)
    observe = [f"return {{{', '.join(f'{json.dumps(group)}: {group}' for group in groups)}}}"]
    for group, parts in groups.items():
        observe[-1:-1] = [f"{group} = {{", *(f'    "{part}": {code},' for part, code in parts.items()), "}"]
    if settings:
        values["observations"] = (settings, "noise, delay [control steps] and history of the policy's parts")
    if "self.down" in "".join(observe):
        init.append("self.down = torch.tensor([0.0, 0.0, -1.0], device=self.device).expand(self.num_envs, 3)")
    if factors:
        init.append(f"self.scales = {json.dumps(factors)}")
    weights, rewards = dict[str, float](), list[str]()
    for term in task.terms["rewards"]:
        weights[term.name] = float(term.more.get("weight", 0.0))
        code = REWARDS.get(term.known_as, "zero")
        numbers = ", ".join(f"{key}={value}" for key, value in term.params.items())
        words = f"  # to write: {term.func.rpartition('.')[2]}({numbers})"[: 102 - len(term.name)]
        rewards.append(f'    "{term.name}": {code},{words if code == "zero" else ""}')
        if code == "zero":
            later("rewards", term)
    for section in ("commands", "terminations", "events"):
        for term in task.terms[section]:
            if term.known_as not in OURS:
                later(section, term)
    if task.code:
        hooks = "_apply_action, _get_observations, _get_rewards, _get_dones, _reset_idx"
        to_write.insert(0, f"actions, observations, rewards, terminations, starts: see {hooks} of {task.code}")
        weights = {key: value for key, value in task.values.items() if "rew" in key and isinstance(value, float)}
        terms["env"] = {key: value for key, value in task.values.items() if key not in weights}
        weights = weights or {"reward": 1.0}
        rewards = [f'    "{key}": zero,  # to write' for key in weights]
    per_second = task.per_second and not task.code
    values["weights"] = (weights, "of the reward terms" + ", per second" * per_second)
    values["terms"] = (terms, "what is to be written, in their words")
    constants = [f"{_constant(key)} = {place}" for key, place in places.items()]
    constants.append(wrapped("ACTED = ", "[]", [json.dumps(joint) for joint in acted]))
    constants.append(
        wrapped("DRIVEN = ", "[]", [json.dumps(joint) for joint in driven]) if driven != acted else "DRIVEN = ACTED"
    )
    words = "targets" if kind == "position" else "efforts"
    words += " from the pose" if kind == "position" and params.get("use_default_offset") else ""
    code = {"scene": scene, "init": init, "observe": observe, "rewards": rewards}
    source = Template(SOURCE).substitute(
        {key: textwrap.indent("\n".join(lines), " " * 8) for key, lines in code.items()},
        **names,
        source=task.source,
        path="from pathlib import Path\n" if "Path(" in "".join(constants) else "",
        math="from gpusim_rl.env.math import quat_rotate_inverse\n" if "inverse(" in "".join(observe) else "",
        constants="\n".join(constants),
        fields="\n".join(f"    {key}: {type_of(value)}" for key, (value, _) in values.items() if key != "observations"),
        to_write="\n".join(f"    - {line}" for line in to_write) or "    - nothing",
        actions=f"{words} / `action_scale`",
        per_second=" x control step" * per_second,
        factor="self.dt * " * per_second,
        root=", **self.root" * robot.free,
        sign="+" if "pose" in words else "",
    )
    yaml, left = yaml_text(task, robot, values, names, "")
    return source, yaml, ["to write:", *(f"  {line}" for line in to_write), *left]


def yaml_text(
    task: LibraryTask,
    robot: RobotElements,
    values: Mapping[str, tuple[Any, str]],
    names: Mapping[str, str],
    head: str,
    more_ppo: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[str, list[str]]:
    """Returns the content of a yaml, and lines for the user on what was not taken; `values` have comments."""
    ppo = {**(ppo_settings(task.agent, task.num_envs) or {"horizon": 24, "minibatch_size": 24576}), **more_ppo}
    iterations = ppo.pop("max_iterations", None) or 1000
    left = by_section(task.left)
    left += [f"{pattern}: the robot's file has none, see --names" for pattern in robot.unmatched]
    control_hz = number(task.control_hz)
    yaml = Template(YAML).substitute(
        names,
        source=task.source,
        head=head,
        physics_hz=number(control_hz * round(task.physics_hz / task.control_hz)),
        control_hz=control_hz,
        episode_length=math.ceil(task.episode_s * task.control_hz - 1e-6) or 1000,
        values=commented_yaml(values),
        num_envs=task.num_envs or 4096,
        max_iterations=iterations,
        ppo=commented_yaml({key: (value, "") for key, value in ppo.items()}),
        left="".join(f"# {line}\n" for line in ["Not taken:", *left]) if left else "",
    )
    notes = [f"  {line}" if len(line) <= 118 else f"  {line[:115]}..." for line in left]
    return yaml, ["not taken, in full at the end of the yaml:", *notes] if left else []


def ppo_settings(agent: Mapping[str, Any], num_envs: int) -> dict[str, Any]:
    """Returns our section `ppo` of rsl_rl's settings, with `max_iterations`; empty where they are not of PPO."""
    algorithm, actor = agent.get("algorithm") or {}, agent.get("actor") or agent.get("policy") or {}
    if not agent or algorithm.get("class_name", "PPO") != "PPO":
        return {}
    known, found = known_keys(), dict[str, Any]()
    for key, value in {**algorithm, "num_steps_per_env": agent.get("num_steps_per_env")}.items():
        ours = str(OTHERS.get(key, key))
        if f"ppo.{ours}" in known and isinstance(value, int | float | str):
            found[ours] = "constant" if (ours, value) == ("schedule", "fixed") else value
    if num_envs and found.get("horizon"):
        found["minibatch_size"] = num_envs * found["horizon"] // algorithm.get("num_mini_batches", 4)
    noise = (actor.get("distribution_cfg") or {}).get("init_std") or actor.get("init_noise_std")
    network = {
        "hidden": actor.get("hidden_dims") or actor.get("actor_hidden_dims"),
        "activation": actor.get("activation"),
        "log_std_init": round(math.log(noise), 4) if isinstance(noise, int | float) and noise > 0 else None,
        "separate": True,
    }
    normalize = actor.get("obs_normalization", actor.get("actor_obs_normalization"))
    found |= {"bounds_coef": 0.0, "normalize_obs": normalize, "max_iterations": agent.get("max_iterations")}
    found["network"] = {key: value for key, value in network.items() if value is not None}
    return {key: value for key, value in found.items() if value is not None}


def _action(task: LibraryTask, later: Callable[[str, Term], None]) -> Term:
    """Returns the action that is taken, the first whose class we know; of a direct env, one of all joints."""
    found = None
    for term in task.terms["actions"]:
        of = term.params.get("asset_name") or term.params.get("entity_name")
        if found is None and term.known_as in KINDS and of == task.robot:
            found = term
        else:
            later("actions", term)
    gains = [drive.get("stiffness") for drive in task.drives]
    servos = any(any(gain.values()) if isinstance(gain, dict) else gain for gain in gains)
    kind = "JointPositionActionCfg" if servos or not task.code else "JointEffortActionCfg"
    scale = task.values.get("action_scale", 1.0)
    return found or Term("all", kind, {"use_default_offset": True, "scale": scale}, {})


def _gains(
    task: LibraryTask, robot: RobotElements, driven: list[str], served: list[str], to_write: list[str]
) -> tuple[dict[str, Any], dict[str, float]]:
    """Returns arguments of `Scene.add_actuators` for the driven joints, and the damping of joints without a servo.

    Joints that are `served` have position servos; if there are none, the drives are of efforts.
    """
    gains: dict[str, dict[str, float]] = {what: {} for what in DRIVE}
    for drive in task.drives:
        for what, numbers in gains.items():
            numbers |= robot.by_joint(drive.get(what), robot.matching(drive["joints"]))
    damping = {} if served else {joint: value for joint, value in gains["damping"].items() if value}
    if not served and any(gains["stiffness"].values()):
        to_write.append(f"drives: there joints are held with stiffness {json.dumps(gains['stiffness'])}")
    if guessed := [joint for joint in served if joint not in gains["stiffness"]]:
        models = ", ".join(sorted({drive["model"] for drive in task.drives}))
        to_write.append(f"drives: the stiffness of {', '.join(guessed)} is a guess: {models} has no such number")
        for what, guess in FIRST_GAINS.items():
            gains[what] = dict.fromkeys(guessed, guess) | gains[what]
    found: dict[str, Any] = {}
    of_file = {"armature": robot.model.dof_armature, "friction": robot.model.dof_frictionloss}
    for what in [each for each in DRIVE if served or each not in ("stiffness", "damping")]:
        own = {joint: value for joint, value in gains[what].items() if joint in driven and math.isfinite(value)}
        if own and what in ("stiffness", "damping", *of_file):  # a joint without the number has that of the file
            for joint in driven:
                column = robot.model.joint(f"robot/{joint}").dofadr[0]
                own.setdefault(joint, float(of_file[what][column]) if what in of_file else 0.0)
        if len(own) == len(driven):
            found[what] = own[driven[0]] if len({*own.values()}) == 1 else by_pattern(driven, own, 0.0)
        elif own:
            task.left[f"drives.{what}"] = own
    return found, damping


def _observations(
    task: LibraryTask, robot: RobotElements, later: Callable[[str, Term], None]
) -> tuple[dict[str, dict[str, str]], dict[str, Any], dict[str, float]]:
    """Returns the code of the parts of each group, the policy's noise, delay and history, and scales."""
    groups: dict[str, dict[str, str]] = {}
    settings, scales = dict[str, Any](), dict[str, float]()
    for group, terms in (task.groups or {"policy": []}).items():
        groups[group] = {}
        for term in terms:
            code, of = OBSERVATIONS.get(term.known_as, ""), term.params.get("asset_cfg") or {}
            here = of.get("name", task.robot) == task.robot and (robot.free or "root" not in code)
            whole = not of.get("joint_names") or robot.matching(of["joint_names"]) == robot.names["joint"]
            if not (code and here and whole) or term.params.keys() - {"asset_cfg", "biased"}:
                later("observations" if group == "policy" else f"{group}_observations", term)
                continue
            groups[group][term.name] = code
            more, noise = term.more | {"biased": term.params.get("biased")}, term.more.get("noise") or {}
            if noise.get("operation", "add") == "add" and not noise.get("mean"):
                more["noise"] = [noise["n_min"], noise["n_max"]] if "n_min" in noise else noise.get("std")
            more["delay"] = [more.pop("delay_min_lag", 0), lag] if (lag := more.pop("delay_max_lag", 0)) else None
            more["history"] = history if (history := more.pop("history_length", 0) or 0) > 1 else None
            if isinstance(scale := more.get("scale"), int | float):
                scales[term.name] = scale
                del more["scale"]
            known = ("noise", "delay", "history") if group == "policy" else ()
            if found := {key: more.pop(key) for key in known if more[key] and not isinstance(more[key], dict)}:
                settings[term.name] = found
            task.left |= {f"observations.{group}.{term.name}.{key}": each for key, each in more.items() if each}
        groups[group] = groups[group] or {key: OBSERVATIONS[key] for key in ("joint_pos", "joint_vel")}
    return groups, settings, scales


def _place(task: LibraryTask, robot: RobotElements) -> str:
    """Returns arguments of `Scene.add` that bring a fixed root to where it is there."""
    pos, quat = task.root
    if robot.free:
        return ""
    if quat != [1.0, 0.0, 0.0, 0.0]:
        return f", pos={pos}, quat={quat}"
    at = robot.model.body(f"robot/{robot.names['body'][0]}").pos
    pos = [round(float(there - here), 6) for there, here in zip(pos, at, strict=True)]
    return f", pos={pos}" if any(pos) else ""


def _constant(name: str) -> str:
    return re.sub(r"\W", "_", name).upper()
