"""MuJoCo options of a scene (`<option>` and `<flag>`): set by the task, else by the robots' files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np

from gpusim_rl.errors import TaskError, did_you_mean
from gpusim_rl.settings.schema import SimConfig

# In the order of MuJoCo's MJOPTION_FIELDS, each a bit of `MjSpec.authored.option`. None: the time step, and the flags.
_FIELDS = (
    *(None, "impratio", "tolerance", "ls_tolerance", "noslip_tolerance", "ccd_tolerance", "sleep_tolerance"),
    *("gravity", "wind", "magnetic", "density", "viscosity", "o_margin", "o_solref", "o_solimp", "o_friction"),
    *("integrator", "cone", "jacobian", "solver", "iterations", "ls_iterations", "noslip_iterations"),
    *("ccd_iterations", None, None, "disableactuator", "sdf_initpoints", "sdf_iterations"),
)
_KINDS = {name: getattr(mujoco, f"mjt{name.capitalize()}") for name in ("integrator", "cone", "jacobian", "solver")}
# Flags by their name in a file: field, bit, and the value that sets the bit.
_FLAGS = {
    f"flag {bit.name.removeprefix(prefix).lower()}": (field, bit.value, word)
    for kind, prefix, field, word in (
        (mujoco.mjtDisableBit, "mjDSBL_", "disableflags", "disable"),
        (mujoco.mjtEnableBit, "mjENBL_", "enableflags", "enable"),
    )
    for bit in kind.__members__.values()
    if bit.name.startswith(prefix)
}
USUAL = (100, 50)  # MuJoCo's default limits on solver and line-search iterations
ON_WARP = (12, 20)  # limits on Warp where a scene has the defaults: all worlds wait for the slowest; see docs/gpu.md


def solver_limits(scene: mujoco.MjOption, cfg: SimConfig, usual: tuple[int, int] = USUAL) -> tuple[int, int]:
    """Return solver and line-search iteration limits: settings, else the scene's, with `usual` in place of defaults."""
    iterations, ls_iterations = (
        replacement if limit == default else limit
        for limit, default, replacement in zip((scene.iterations, scene.ls_iterations), USUAL, usual, strict=True)
    )
    return cfg.iterations or iterations, cfg.ls_iterations or ls_iterations


class SceneOption:
    """Physics options, named as in `mujoco.MjOption`; values set here take precedence over those in files."""

    _spec: mujoco.MjSpec
    _changed: Callable[[], None]
    _decided: dict[str, tuple[Any, str | None]]  # value and file (None: the task) by name

    def __init__(self, spec: mujoco.MjSpec, changed: Callable[[], None]) -> None:
        vars(self).update(_spec=spec, _changed=changed, _decided={})

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._spec.option, name)
        if isinstance(value, np.ndarray):
            value = value.copy()
            value.setflags(write=False)  # a value written into the copy would be lost
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        known = [field for field in dir(self._spec.option) if not field.startswith("_")]
        if name == "timestep":
            raise TaskError("cannot set scene.option.timestep: it is 1 / physics_hz", hint="Set task.physics_hz")
        if name not in known:
            raise TaskError(f"scene.option has no field {name!r}", hint=did_you_mean(name, known))
        setattr(self._spec.option, name, value)
        self._decided[name] = (value, None)
        self._changed()

    def take_over(self, part: mujoco.MjSpec, source: str) -> None:
        """Merge a file's options, except options that the task has set; raise TaskError if files disagree."""
        option = self._spec.option
        for name, value in _authored(part).items():
            field = _FLAGS[name][0] if name in _FLAGS else name
            before, other = self._decided.get(field) or self._decided.get(name) or (value, source)
            if other is None:
                continue  # set by the task
            if value != before:
                problem = f"conflicting {name}: {_shown(name, before)} in {other}, {_shown(name, value)} in {source}"
                raise TaskError(problem, hint=f"Try setting scene.option.{field} before adding the files")
            self._decided[name] = value, other
            if name in _FLAGS:
                _, bit, word = _FLAGS[name]
                bits = getattr(option, field)
                value = bits | bit if value == word else bits & ~bit
            setattr(option, field, value)
        clear_option(part)


def clear_option(spec: mujoco.MjSpec) -> None:
    """Reset a spec's options, including MuJoCo's record of which ones a file has set."""
    spec.option = mujoco.MjSpec().option
    authored = spec.authored
    authored.option = authored.disableflags = authored.enableflags = authored.disableactuator = 0


def _authored(spec: mujoco.MjSpec) -> dict[str, Any]:
    """Return the options that a file sets or, for a spec built in Python, those that differ from the default."""
    default, options = mujoco.MjSpec().option, {}
    for bit, name in enumerate(_FIELDS):
        if name is not None:
            value, usual = (np.asarray(getattr(option, name)).tolist() for option in (spec.option, default))
            if spec.authored.option >> bit & 1 or value != usual:
                options[name] = value
    for name, (field, bit, word) in _FLAGS.items():
        value, usual = (getattr(option, field) & bit for option in (spec.option, default))
        if getattr(spec.authored, field) & bit or value != usual:
            options[name] = word if value else {"disable": "enable", "enable": "disable"}[word]
    return options


def _shown(name: str, value: Any) -> Any:
    return _KINDS[name](value).name if name in _KINDS else value
