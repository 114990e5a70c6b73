"""Robots of MuJoCo Menagerie by name: `Scene.add("go1", "menagerie:unitree_go1")`.

The `mujoco-menagerie` package (extra `robots`) downloads a model on first use.
"""

from __future__ import annotations

from typing import Any

import mujoco

from gpusim_rl.errors import ConfigError, TaskError, did_you_mean, import_extra
from gpusim_rl.sim import keyframe as keyframes
from gpusim_rl.sim.option import clear_option

PREFIX = "menagerie:"
HOME = "home"  # Menagerie's keyframe of the standing robot


def load(source: str, keyframe: str | None = None) -> mujoco.MjSpec:
    """Return a robot's spec without the file's floor, lights, cameras, keyframes and solver settings.

    Args:
        source: `menagerie:<robot>`, or `menagerie:<robot>/<model>` (`menagerie:unitree_g1/g1_with_hands`).
        keyframe: Reference pose instead of `home`. By default, a robot with equality constraints between bodies, or
            without a `home` keyframe, keeps the file's pose.
    """
    robot_name, _, entry = source.removeprefix(PREFIX).partition("/")
    try:
        package: Any = import_extra("mujoco_menagerie", "robots", source)
    except ConfigError as error:
        raise TaskError(error.problem, key=error.key, hint=error.hint) from None
    names = package.names()
    if robot_name not in names:
        hint = f"{did_you_mean(robot_name, names)} `python -m mujoco_menagerie names` lists all {len(names)} robots"
        raise TaskError("no such robot", key=source, hint=hint)
    robot = package.get(robot_name)
    if entry and entry not in robot.entry_names:
        raise TaskError(f"no model {entry!r}", key=source, hint=f"Available: {', '.join(robot.entry_names)}")
    try:
        spec = mujoco.MjSpec.from_file(str(robot.xml(entry or robot.default_model)))
        if keyframe is not None:
            keyframes.stand(spec, keyframe)
        elif all(tie.type in keyframes.JOINT_TIES for tie in spec.equalities) and keyframes.usable(spec, HOME):
            keyframes.stand(spec, HOME)
    except TaskError as error:
        raise error.within(source) from None
    except package.DownloadError as error:
        url, _, reason = str(error).partition(": ")
        reason = getattr(error.__cause__, "reason", None) or reason  # instead of <urlopen error ...>
        hint = f"If offline, unpack the archive and set MENAGERIE_ROOT to the folder that contains {robot_name}/"
        raise TaskError(f"cannot download {url}: {' '.join(str(reason).split())}", key=source, hint=hint) from None
    except (package.MenagerieError, OSError, ValueError) as error:
        raise TaskError(" ".join(str(error).split()), key=source) from None
    _strip(spec)
    return spec


def _strip(spec: mujoco.MjSpec) -> None:
    world = spec.worldbody
    removed = [*world.geoms, *world.sites, *spec.lights, *spec.cameras]
    names = {element.name for element in removed if element.name}
    orphans = [sensor for sensor in spec.sensors if not names.isdisjoint((sensor.objname, sensor.refname))]
    for element in [*orphans, *removed, *spec.keys]:
        spec.delete(element)
    clear_option(spec)
