"""What a configuration of Isaac Lab or mjlab says of an env, as plain data: `tools/new_task.py`. No env is made.

Both describe an env by terms of managers: actions, observations, rewards, terminations, events, commands. A term is a
function with parameters. mjlab keeps terms in dicts, Isaac Lab in attributes. What nobody reads can be told: a reader
knows the values that are not the library's own defaults.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

from gpusim_rl.connect.library_config import quietly
from gpusim_rl.errors import ConfigError, first_line
from gpusim_rl.settings.schema import EnvConfig
from gpusim_rl.sim.warp import start_warp

NAMES = {  # of Isaac Lab, of mjlab
    "library": ("Isaac Lab", "mjlab"),
    "class": ("ManagerBasedRLEnvCfg", "ManagerBasedRlEnvCfg"),
    "robots": ("scene", "scene.entities"),
    "dt": ("sim.dt", "sim.mujoco.timestep"),
    "solver": ("sim.physics.solver_cfg", "sim.mujoco"),
    "gravity": ("sim.gravity", "sim.mujoco.gravity"),
    "drives": ("actuators", "articulation.actuators"),
    "joints": ("joint_names_expr", "target_names_expr"),
    "soft_limit": ("soft_joint_pos_limit_factor", "articulation.soft_joint_pos_limit_factor"),
    "asset": ("asset_name", "entity_name"),
    "policy": ("policy", "actor"),
}
"""What is named differently in the two."""
DRIVE = {"stiffness": ("stiffness",), "damping": ("damping",), "stall_effort": ("saturation_effort",)}
DRIVE |= {"effort_limit": ("actuator_effort_limit", "effort_limit", "joint_effort_limit", "effort_limit_sim")}
DRIVE |= {"velocity_limit": ("actuator_velocity_limit", "velocity_limit"), "armature": ("armature",)}
DRIVE |= {"friction": ("friction", "frictionloss")}
"""Their names of a drive's numbers; the first that has a value counts."""
USUAL = {"cone": "pyramidal", "impratio": 1.0, "gravity": [0.0, 0.0, -9.81]}
OF_RUNS = ("sim.render_interval", "sim.device", "seed", "auto_reset", "scene.env_spacing", "scene.ground")
DRAWN = {"viewer", "ui_window_class_type", "recorders", "metrics", "teleop_devices", "video_recorders"}
"""Sections about pictures, windows and recordings, which are not of the task."""
UNSEEN = ("debug_vis", "viz", "visualizer", "marker", "class", "prim_path", "visual_material")
"""Words in the names of fields that a section is made by or drawn with."""


@dataclass
class Term:
    """A term of one of their managers."""

    name: str
    func: str  # qualified name of its function or class, `isaaclab.envs.mdp.rewards.joint_vel_l1`
    params: dict[str, Any]  # of the function, or fields of the class, as plain values
    more: dict[str, Any]  # its settings that are not the defaults, such as `weight`, `noise` and `mode`

    @property
    def known_as(self) -> str:
        """Name of the function, if it is one of the two libraries' own."""
        own = self.func.startswith(("isaaclab.", "isaaclab_tasks.", "mjlab."))
        return self.func.rpartition(".")[2] if own else ""


@dataclass
class LibraryTask:
    """What a configuration of Isaac Lab or mjlab says of an env, in the terms of both."""

    source: str  # name of the configuration and its library
    physics_hz: float
    control_hz: float
    episode_s: float  # 0 is no limit
    num_envs: int  # 0 where it does not say
    robot: str  # its name in the scene
    root: tuple[list[float], list[float]]  # position [m] and orientation (wxyz) of its root at the start
    pose: dict[str, float]  # joint positions at the start, by regular expression [rad or m]
    drives: list[dict[str, Any]]  # `model`, `joints`, and numbers by our names
    option: dict[str, Any]  # arguments of our `Scene`, such as the integrator
    groups: dict[str, list[Term]]  # observations of `policy`, and of `critic` where they are others
    terms: dict[str, list[Term]]  # `actions`, `rewards`, `terminations`, `events` and `commands`
    code: str = ""  # qualified name of the class of a direct env, which has no terms
    values: dict[str, Any] = field(default_factory=dict)  # a direct env's own settings
    soft_limit: float = 1.0  # share of the joints' ranges that their terms take for the limits
    per_second: bool = True  # whether rewards are multiplied by the control step
    agent: dict[str, Any] = field(default_factory=dict)  # settings of rsl_rl
    left: dict[str, Any] = field(default_factory=dict)  # what was not read and is not a default, by path
    files: dict[str, bytes] = field(default_factory=dict)  # of the robot and of objects, by relative path
    robot_file: str = ""  # that of the robot among them, or its address there
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)  # `file`, `pos` [m] and `quat` (wxyz), by name


class CfgReader:
    """Reads values of a configuration by their paths, and knows which were not read.

    Attributes:
        left: What is not a default and was not read, by path such as `sim.dt`.
    """

    def __init__(self, cfg: Any) -> None:
        self._tree: dict[str, Any] = plain(cfg)
        self.left = dict(_chosen(cfg))

    def get(self, path: str, default: Any = None) -> Any:
        """Returns the plain value at a path."""
        node: Any = self._tree
        for key in path.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        return default if node is None else node

    def take(self, path: str, default: Any = None) -> Any:
        """Returns the plain value at a path. It, and all below it, has been read then."""
        self.left = {key: value for key, value in self.left.items() if not f"{key}.".startswith(f"{path}.")}
        return self.get(path, default)

    def terms(self, path: str) -> list[Term]:
        """Returns the terms of a manager; they have been read then. What has no `func` has a class."""
        found = []
        for name, term in self.get(path, {}).items():
            if not isinstance(term, dict):
                continue
            place = f"{path}.{name}."
            changed = {key.removeprefix(place).partition(".")[0] for key in self.left if key.startswith(place)}
            self.take(place[:-1])
            members = {
                key: value for key, value in _without_class(term).items() if not any(word in key for word in UNSEEN)
            }
            params = members.pop("params", {}) if members.pop("func", None) else members
            more = {key: value for key, value in members.items() if key in changed}
            found.append(Term(name, term.get("func") or term.get("class", ""), params, more))
        return found


def read_cfg(library: str, name: str) -> LibraryTask:
    """Reads a configuration by its id, by `module:id`, or by its class or function, `my_envs.MyEnvCfg`.

    Args:
        library: `isaaclab` or `mjlab`.
        name: Name of the configuration.

    Raises:
        ConfigError: The library is missing, there is no such configuration, or it is none of an env that moves.
    """
    option, key = f"--from-{library}", "_target_" if "." in name and ":" not in name else "id"
    nothing: dict[str, Any] = {field.name: None for field in dataclasses.fields(EnvConfig)}
    start_warp(torch.device("cpu"))  # it says nothing of a GPU
    logging.disable(logging.WARNING)  # Isaac Lab warns of the GPU that a configuration needs not
    try:
        with quietly(library):
            find = importlib.import_module(f"gpusim_rl.connect.{library}").find_cfg
            cfg, *_, found = find(EnvConfig(**{**nothing, key: name}))
            envs = importlib.import_module(f"{library}.envs")
            expected = [getattr(envs, NAMES["class"][library == "mjlab"]), getattr(envs, "DirectRLEnvCfg", ())]
            if not isinstance(cfg, (expected[0], expected[1])):
                found = f"a {type(cfg).__name__} is no configuration of an env, expected a {expected[0].__name__}"
                raise ConfigError(f"{option} {name}: {found}")
            task = _read(cfg, library, found, plain(_agent(library, found)) if key == "id" else {})
            if isinstance(cfg, expected[1]):
                import gymnasium

                task.code = str(gymnasium.spec(found).entry_point)
                own = vars(cfg).keys() - expected[1].__dataclass_fields__.keys()
                task.values = {key: task.left.pop(key) for key in sorted(own & task.left.keys())}
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"env.{key}=", f"{option} ")) from None
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{option} {name}: it makes no configuration of an env: {first_line(error)}") from error
    finally:
        logging.disable(logging.NOTSET)
    return task


def _agent(library: str, name: str) -> Any:
    """Returns the settings of rsl_rl for an id, or an empty dict."""
    if library == "mjlab":
        return importlib.import_module("mjlab.tasks.registry").load_rl_cfg(name)
    import gymnasium

    key = "rsl_rl_cfg_entry_point"
    if key not in (gymnasium.spec(name).kwargs or {}):
        return {}
    agent = importlib.import_module("isaaclab_tasks.utils.parse_cfg").load_cfg_from_registry(name, key)
    return importlib.import_module("isaaclab_tasks.utils.hydra").resolve_presets(agent, [])


def _read(cfg: Any, library: str, name: str, agent: dict[str, Any]) -> LibraryTask:
    names = {key: pair[library == "mjlab"] for key, pair in NAMES.items()}
    reader, order = CfgReader(cfg), "wxyz" if library == "mjlab" else "xyzw"
    take = reader.take
    terms = {key: reader.terms(key) for key in ("actions", "rewards", "terminations", "events", "commands")}
    places = {key: f"{names['robots']}.{key}" for key in reader.get(names["robots"], {})} | {"robot_cfg": "robot_cfg"}
    places |= {key: key for key in vars(cfg) if key not in ("actions", "observations")}
    robots = [key for key, path in places.items() if reader.get(f"{path}.{names['drives']}")]
    moved = [term.params.get(names["asset"]) for term in terms["actions"]]
    robot = next((key for key in moved if key in robots), next(iter(robots), None))
    if robot is None:
        raise ConfigError(f"--from-{library} {name}: nothing in its scene is moved by drives of its own")
    path = places[robot]
    dt, decimation = take(names["dt"]), take("decimation")
    option = {key: take(f"{names['solver']}.{key}") for key in ("integrator", "cone", "impratio")}
    option["gravity"] = take(names["gravity"])
    for key in (*OF_RUNS, *(["scene.terrain"] if reader.get("scene.terrain.terrain_type") == "plane" else [])):
        take(key)
    files: dict[str, bytes] = {}
    objects: dict[str, dict[str, Any]] = {}
    for key, entity in cfg.scene.entities.items() if library == "mjlab" else ():
        there, mjlab = f"scene.entities.{key}", importlib.import_module("gpusim_rl.connect.mjlab")
        objects[key] = {"file": mjlab.mjcf_of(entity, key, files)}
        objects[key] |= {"pos": take(f"{there}.init_state.pos"), "quat": take(f"{there}.init_state.rot")}
        for edited in [each for each in reader.get(there) if each not in ("init_state", "articulation")]:
            take(f"{there}.{edited}")
    turn = dict(zip(order, take(f"{path}.init_state.rot", [float(axis == "w") for axis in order]), strict=True))
    spawn = reader.get(f"{path}.spawn", {})
    drives = {f"{path}.{names['drives']}.{key}" for key in reader.get(f"{path}.{names['drives']}") if key != "class"}
    return LibraryTask(
        source=f"{name} of {names['library']} {metadata.version(library)}",
        physics_hz=take("sim.physics.num_substeps", 1) / dt,  # Newton's own steps in one of theirs
        control_hz=1.0 / (dt * decimation),
        episode_s=float(take("episode_length_s", 0.0)),
        num_envs=4096 if library == "mjlab" else take("scene.num_envs", 0),  # of mjlab an argument's default
        robot=robot,
        root=(take(f"{path}.init_state.pos", [0.0, 0.0, 0.0]), [turn[axis] for axis in "wxyz"]),
        pose=take(f"{path}.init_state.joint_pos", {}),
        drives=[_drive(reader, each, names["joints"]) for each in sorted(drives)],
        option={key: value for key, value in option.items() if value not in (None, USUAL.get(key))},
        groups=_groups(reader, agent.get("obs_groups") or {}, names["policy"]),
        terms=terms,
        soft_limit=take(f"{path}.{names['soft_limit']}", 1.0),
        per_second=take("scale_rewards_by_dt", True),
        agent=agent,
        files=files,
        robot_file=objects[robot]["file"] if objects else spawn.get("usd_path") or spawn.get("asset_path") or "",
        objects={key: each for key, each in objects.items() if key != robot},
        left=reader.left,
    )


def _drive(reader: CfgReader, path: str, joints: str) -> dict[str, Any]:
    model = reader.get(f"{path}.class").rpartition(".")[2]
    drive: dict[str, Any] = {"model": model, "joints": reader.take(f"{path}.{joints}")}
    # A motor of theirs without a torque-speed line has a velocity limit that does nothing to its effort.
    line = reader.get(f"{path}.saturation_effort") is not None
    for ours, theirs in DRIVE.items():
        found = next((f"{path}.{key}" for key in theirs if reader.get(f"{path}.{key}") is not None), None)
        if found is not None and (line or ours != "velocity_limit"):
            drive[ours] = reader.take(found)
    return drive


def _groups(reader: CfgReader, chosen: Mapping[str, Any], policy: str) -> dict[str, list[Term]]:
    """Returns observation terms, with what their group says of noise and history."""
    found: dict[str, list[Term]] = {}
    for ours, network, group_of in (("policy", "actor", policy), ("critic", "critic", "critic")):
        terms: dict[str, Term] = {}
        for group in chosen.get(network) or chosen.get(ours) or [group_of]:
            path = f"observations.{group}"
            settings = reader.get(path, {})
            for term in reader.terms(f"{path}.terms" if settings.get("terms") else path):
                if not settings.get("enable_corruption"):
                    term.more.pop("noise", None)
                if settings.get("history_length") is not None:
                    term.more["history_length"] = settings["history_length"]
                term.name = term.name if term.name not in terms else f"{group}_{term.name}"
                terms[term.name] = term
            for key in ("enable_corruption", "history_length", "concatenate_terms", "terms"):
                reader.take(f"{path}.{key}")
        if terms and [*terms.values()] != found.get("policy"):
            found[ours] = [*terms.values()]
    return found


def plain(value: Any) -> Any:
    """Returns numbers, strings, lists and dicts for their objects, whose `class` is told; functions become names."""
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return str(value) if isinstance(value, str) else value  # they have strings that are more
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, list | tuple | set | frozenset) and not any(map(_members, value)):
        return [plain(item) for item in value]
    found = {key: plain(item) for key, item in _members(value).items() if not _missing(item)}
    if {"joint_names", "body_names"} <= {*_members(value)}:  # elements of the scene
        return {key: item for key, item in found.items() if key == "name" or (key.endswith("_names") and item)}
    if isinstance(value, Mapping | list | tuple):
        return found
    return found | {"class": f"{type(value).__module__}.{type(value).__qualname__}"} if found else str(value)


def by_section(left: Mapping[str, Any]) -> list[str]:
    """Returns what was not read as a line for each section, `scene.light: spawn.intensity=2000.0`."""
    lines: dict[str, list[str]] = {}
    for path, value in left.items():
        keys = path.split(".")
        if keys[0] not in DRAWN and not any(word in key for key in keys for word in UNSEEN):
            depth = max(1, min(2 if keys[0] in ("scene", "sim") else 1, len(keys) - 1))
            name = ".".join(keys[depth:])
            lines.setdefault(".".join(keys[:depth]), []).append(
                f"{name}={json.dumps(value)}" if name else json.dumps(value)
            )
    return [f"{section}: {', '.join(values)}" for section, values in lines.items()]


def _missing(value: Any) -> bool:
    """Whether a field has no value: None, a slice of all, or the mark of a dataclass for a field without default."""
    return (
        value is None or isinstance(value, slice) or value is dataclasses.MISSING or "MISSING" in type(value).__name__
    )


def _members(node: Any) -> dict[str, Any]:
    if isinstance(node, Mapping):
        return {str(key): value for key, value in node.items()}
    if isinstance(node, list | tuple):
        return {getattr(value, "name", None) or str(i): value for i, value in enumerate(node)}
    if isinstance(node, type) or (callable(node) and hasattr(node, "__qualname__")):
        return {}
    return {key: value for key, value in getattr(node, "__dict__", {}).items() if not key.startswith("_")}


def _chosen(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields path and value of all that is not a default of the library's own classes."""
    own = [cls for cls in type(node).__mro__ if cls.__module__.startswith(("isaaclab.", "mjlab."))]
    own = [cls for cls in own if not cls.__module__.startswith("mjlab.tasks.")]
    fields = getattr(own[0], "__dataclass_fields__", {}) if own else {}
    for key, value in _members(node).items():
        if _missing(value):
            continue
        if key in fields:
            made = fields[key].default_factory
            default = fields[key].default if made is dataclasses.MISSING else made()
            if not _missing(default) and type(default) is type(value) and plain(default) == plain(value):
                continue
        place = f"{path}.{key}" if path else key
        if _members(value) and not (isinstance(value, list | tuple) and not any(map(_members, value))):
            yield from _chosen(value, place)
        elif value not in ({}, [], ()):
            yield place, plain(value)


def _without_class(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_class(item) for key, item in value.items() if key != "class"}
    return [_without_class(item) for item in value] if isinstance(value, list) else value
