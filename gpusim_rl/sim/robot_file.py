"""Robot files: read a robot, name its elements and adjust it before it joins the scene."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import mujoco
import numpy as np

from gpusim_rl.errors import TaskError
from gpusim_rl.sim import keyframe as keyframes
from gpusim_rl.sim import menagerie
from gpusim_rl.sim.robot_xml import read_mjcf
from gpusim_rl.sim.urdf import is_urdf, read_urdf

logger = logging.getLogger(__name__)

HIDDEN_GROUP = 3  # first group of geoms that viewers hide
_WARNINGS_SHOWN = 4
_FREE = mujoco.mjtJoint.mjJNT_FREE


_logged: set[str] = set()  # training, evaluation and tools each build the scene: warn once


@contextmanager
def mujoco_warnings(source: str) -> Iterator[None]:
    """Log MuJoCo's warnings from the block in one line, each once per process."""
    lines: list[str] = []
    caught: list[warnings.WarningMessage] = []
    mujoco.set_mju_user_warning(lines.append)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        # Without a handler MuJoCo appends warnings to MUJOCO_LOG.TXT; simulators report diverged worlds by mask.
        mujoco.set_mju_user_warning(logger.debug)
        lines = [" ".join(line.split()) for line in (*lines, *(str(warning.message) for warning in caught))]
        if new := [line for line in dict.fromkeys(lines) if line not in _logged]:
            _logged.update(new)
            more = f"; and {len(new) - _WARNINGS_SHOWN} more" if len(new) > _WARNINGS_SHOWN else ""
            logger.warning("%s: MuJoCo warns: %s%s", source, "; ".join(new[:_WARNINGS_SHOWN]), more)


def one_line(error: Exception) -> str:
    """Return an error's message without line breaks."""
    return " ".join(str(error).split())


def read_robot(
    source: str | Path | mujoco.MjSpec,
    packages: Mapping[str, str | Path] | None,
    keyframe: str | None,
    fixed_base: bool | None,
) -> tuple[mujoco.MjSpec, dict[str, float]]:
    """Read a robot (see `Scene.add`); return a spec with all elements named, and URDF velocity limits [rad/s or m/s].

    Raise TaskError for arguments that do not fit the file, ValueError or FileNotFoundError for an invalid file.
    """
    limits, notes = dict[str, float](), list[str]()
    from_menagerie = isinstance(source, str) and source.startswith(menagerie.PREFIX)
    from_urdf = isinstance(source, str | Path) and not from_menagerie and is_urdf(Path(source))
    if packages is not None and not from_urdf:
        raise TaskError("packages apply to URDF files only")
    if not isinstance(source, str | Path):
        spec = source
    elif from_menagerie:
        spec = menagerie.load(str(source), keyframe)
    elif from_urdf:
        spec, limits, notes = read_urdf(Path(source), packages or {})
    else:
        spec = read_mjcf(Path(source))
    for line in (line for line in notes if line not in _logged):
        logger.warning(line)
    _logged.update(notes)
    for kind, elements in (("body", spec.bodies), ("joint", spec.joints), ("actuator", spec.actuators)):
        for number, element in enumerate(elements):
            element.name = element.name or f"{kind}{number}"
    if keyframe is not None and not from_menagerie:
        keyframes.stand(spec, keyframe)
    for key in list(spec.keys):  # keyframes fit only the file's own joints
        spec.delete(key)
    if fixed_base is not None:
        _fix_base(spec, fixed_base)
    if spec.compiler.settotalmass > 0:
        _fix_masses(spec)
    return spec, limits


def free_objects(spec: mujoco.MjSpec) -> list[str]:
    """Return the names of free bodies directly under the worldbody, except the first body."""
    return [body.name for body in spec.worldbody.bodies[1:] if _free_joint(body)]


def _free_joint(body: mujoco.MjsBody) -> mujoco.MjsJoint | None:
    return next((joint for joint in body.joints if joint.type == _FREE), None)


def _fix_base(spec: mujoco.MjSpec, fixed: bool) -> None:
    if not (bodies := spec.worldbody.bodies):
        raise TaskError("fixed_base requires a file with a body")
    base, joint = bodies[0], _free_joint(bodies[0])
    if fixed and joint is not None:
        spec.delete(joint)
    elif not fixed and joint is None:
        if base.joints:
            names = [joint.name for joint in base.joints]
            raise TaskError(f"cannot free base {base.name!r}, which already has joints {names}", key="fixed_base=False")
        base.add_freejoint(name="root")


def _fix_masses(spec: mujoco.MjSpec) -> None:
    """Write compiled masses into the bodies: attaching loses `settotalmass`, a setting of the whole spec."""
    compiler = spec.compiler
    compiler.fusestatic = compiler.discardvisual = False  # they would remove bodies
    model = spec.compile()
    for body in spec.bodies[1:]:
        body.explicitinertial = True
        body.mass, body.ipos = model.body_mass[body.id], model.body_ipos[body.id]
        body.iquat, body.inertia = model.body_iquat[body.id], model.body_inertia[body.id]
        body.fullinertia[0] = math.nan  # unset
        body.ialt.type = mujoco.mjtOrientation.mjORIENTATION_QUAT
    compiler.settotalmass, compiler.boundmass, compiler.boundinertia = -1.0, 0.0, 0.0  # already applied
    compiler.inertiafromgeom = mujoco.mjtInertiaFromGeom.mjINERTIAFROMGEOM_FALSE


def hide_collision_shapes(model: mujoco.MjModel) -> None:
    """Hide collision shapes (group 0 by convention) of bodies with visual shapes (group 1 or 2).

    Bodies whose visual shapes are much smaller than their collision shapes show both.
    """
    collides = (model.geom_contype | model.geom_conaffinity) != 0
    visual, drawn = ~collides & np.isin(model.geom_group, (1, 2)), collides & (model.geom_group == 0)
    for body in range(1, model.nbody):
        geoms = model.geom_bodyid == body
        looks, shapes = (model.geom_rbound[geoms & kind].max(initial=0.0) for kind in (visual, drawn))
        if looks > 0.5 * shapes > 0.0:
            model.geom_group[geoms & drawn] = HIDDEN_GROUP


def attach(scene: mujoco.MjSpec, spec: mujoco.MjSpec, name: str, frame: mujoco.MjsFrame, source: object) -> None:
    """Attach a robot to a scene's spec; TaskError or ValueError for references to missing names, which MuJoCo drops."""
    kinds = ("actuators", "sensors", "tendons", "equalities", "pairs", "excludes", "tuples")
    expected = {kind: len(getattr(scene, kind)) + len(getattr(spec, kind)) for kind in kinds}
    scene.attach(spec, prefix=f"{name}/", frame=frame)
    if lost := [kind for kind in kinds if len(getattr(scene, kind)) < expected[kind]]:
        if isinstance(source, str | Path):
            mujoco.MjSpec.from_file(str(source)).compile()  # raises ValueError with the name and its line
        raise TaskError(f"some {' and '.join(lost)} refer to missing elements")
