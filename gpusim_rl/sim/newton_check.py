"""Import check: Newton's solver must have the model that MuJoCo compiles from the scene."""

from __future__ import annotations

import re
from typing import Any

import mujoco
import numpy as np

from gpusim_rl.errors import ConfigError
from gpusim_rl.sim.buffers import may_touch
from gpusim_rl.sim.newton_model import collided_geoms, lacks_option
from gpusim_rl.sim.scene import Scene

_OTHER_COUNTS = re.compile(
    "ngeom|nmesh.*|npolygonmax|nbvh.*|noct"  # geoms that touch nothing are left out
    "|nC"  # entries of the mass matrix that are always 0
    "|nsensor.*"  # there are none; see `NewtonSim`
    "|ncam|nlight|nmat|ntex.*|nskin.*|nkey|nuser.*|nnumeric.*|ntuple.*"  # what physics does not read
    "|nnames.*|npaths|nbuffer|narena|nconmax|njmax"  # names and memory
)
"""Counts of `MjModel` that may differ, and why."""

_KINDS = {"jnt": "joint", "dof": "joint", "qpos": "joint", "wrap": "tendon", "eq": "equality"}
_KINDS |= {name: name for name in ("body", "tendon", "pair", "exclude", "actuator", "geom", "site")}
"""Prefixes of the compared arrays of `MjModel`, and what they belong to."""

_FIRST = {"dof": "jnt_dofadr", "qpos": "jnt_qposadr", "wrap": "tendon_adr"}
"""Arrays with the address of an element's first row."""

_OTHER_ARRAYS = re.compile(
    r"\w+_(user|group|rgba|matid|width|plugin|sameframe|simple\w*|(geom|bvh|M)adr)|tendon_adr"  # pictures, numbering
    r"|\w+_(invweight0|acc0|M0|length0?|lengthrange|subtreemass)"  # they follow from the others
    r"|body_(geomnum|bvhnum|margin)"  # geoms that touch nothing are left out
    r"|geom_(size|dataid|rbound)|site_(type|size)"  # of geoms, whose boxes are compared; of sensors
    r"|\w+_actfrclimited"  # there is a limit that is never reached
    r"|actuator_ctrlspec"  # of DC motors, which are refused
)
"""Arrays that may differ, and why."""

_NO_LIMIT = 1e5  # where there is none, Newton has one above this


def check_import(scene: Scene, solver: Any, num_envs: int) -> None:
    """Raise ConfigError if the solver's model is not the scene's, element by element."""
    model, solved, labels = scene.model, solver.mj_model, solver.model.body_label
    same = len(labels) == num_envs * (model.nbody - 1)
    if not same or not all(labels[i].endswith(f"/{model.body(i + 1).name}") for i in range(model.nbody - 1)):
        raise _differs("this scene", "other bodies")
    for name in (model.tendon(i).name for i in range(model.ntendon)):
        if name not in {solved.tendon(i).name for i in range(solved.ntendon)}:
            raise ConfigError(f"sim=newton does not import the tendon {name!r}; try sim=mjwarp")
    for name in dir(model):
        prefix = name.split("_")[0].removesuffix("0")
        if prefix in _KINDS and isinstance(getattr(model, name), np.ndarray) and not _OTHER_ARRAYS.fullmatch(name):
            _check_array(name, prefix, model, solver)
    counts = [name for name in dir(model) if name[0] == "n" and isinstance(getattr(model, name), int)]
    counts = [name for name in counts if not _OTHER_COUNTS.fullmatch(name)]
    pairs = {name: (getattr(solved, name), getattr(model, name)) for name in counts}
    pairs["ngeom"] = solved.ngeom, len(collided_geoms(model))
    pairs["nfluidshape"] = int(solved.geom_fluid[:, 0].sum()), int(model.geom_fluid[:, 0].sum())
    for name, (found, expected) in pairs.items():
        if found != expected:
            raise _differs("this scene", f"{name} = {found}, expected {expected}")
    _check_contacts(model, solver.mjw_model)
    of_settings = ("timestep", "iterations", "ls_iterations")
    for name in (name for name in dir(model.opt) if not name.startswith("_") and name not in of_settings):
        if not np.allclose(getattr(solved.opt, name), getattr(model.opt, name), rtol=1e-5):
            raise lacks_option(name, getattr(model.opt, name))


def _check_contacts(model: mujoco.MjModel, solved: Any) -> None:
    """Compare the solver's candidate pairs with those that may touch by MuJoCo's rules."""
    geoms = collided_geoms(model)
    touch, (first, second) = may_touch(model), (model.pair_geom1, model.pair_geom2)
    touch[first, second] = touch[second, first] = True
    touch, found = touch[np.ix_(geoms, geoms)], np.zeros((len(geoms), len(geoms)), dtype=bool)
    found[tuple(solved.nxn_geom_pair_filtered.numpy().reshape(-1, 2).T)] = True
    for a, b in np.argwhere(np.triu(touch != (found | found.T), 1)):
        names = " and ".join(repr(model.geom(geoms[i]).name) for i in (a, b))
        raise _differs(f"the geoms {names}", f"contact = {found[a, b]}, expected {touch[a, b]}")


def _array(solver: Any, name: str) -> np.ndarray:
    """Return an array as the solver steps with it, of the first env."""
    compiled, array = getattr(solver.mj_model, name), getattr(solver.mjw_model, name, None)
    if array is None or isinstance(array, int | float):
        return compiled
    values = array.numpy()
    return values[0] if values.ndim > compiled.ndim else values


def _check_array(name: str, prefix: str, model: mujoco.MjModel, solver: Any) -> None:
    expected, found = (np.array(each, dtype=float) for each in (getattr(model, name), _array(solver, name)))
    rows = collided_geoms(model) if prefix == "geom" else np.arange(len(expected))
    expected = expected[rows]
    found = found.reshape(expected.shape) if found.size == expected.size else found
    if name in ("pair_geom1", "pair_geom2"):
        expected = np.searchsorted(collided_geoms(model), expected)
    if expected.shape != found.shape or not expected.size:
        return  # a count differs
    expected, found = (values.reshape(len(values), -1) for values in (expected, found))
    if name.endswith("quat"):  # the other sign is the same orientation
        found *= np.where((found * expected).sum(axis=1, keepdims=True) < 0.0, -1.0, 1.0)
    if name.endswith("range"):
        for each, values in ((model, expected), (solver.mj_model, found)):
            limited = getattr(each, name.replace("range", "limited")) != 0
            values[~limited | (np.abs(values) > _NO_LIMIT).all(axis=1)] = 0.0
    rtol = 1e-3 if getattr(model, name).dtype.kind == "f" else 0.0
    wrong = np.flatnonzero(~np.isclose(found, expected, rtol=rtol, atol=1e-6).all(axis=1))
    if len(wrong):
        row, kind = int(wrong[0]), _KINDS[prefix]
        owner = int(rows[row])
        if prefix in _FIRST:
            owner = int(np.searchsorted(getattr(model, _FIRST[prefix]), row, side="right")) - 1
        got, wanted = (" ".join(f"{value:g}" for value in values[row]) for values in (found, expected))
        raise _differs(
            f"the {kind} {getattr(model, kind)(owner).name or owner!r}", f"{name} = {got}, expected {wanted}"
        )


def _differs(where: str, what: str) -> ConfigError:
    return ConfigError(f"sim=newton imports {where} with {what}; try sim=mjwarp")
