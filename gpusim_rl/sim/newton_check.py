"""Import check: the model in Newton's solver must equal the model that MuJoCo compiles from the scene."""

from __future__ import annotations

import re
from typing import Any

import mujoco
import numpy as np

from gpusim_rl.sim.buffers import may_touch
from gpusim_rl.sim.newton_model import collided_geoms, lacks_option, unsupported
from gpusim_rl.sim.scene import Scene

_OTHER_COUNTS = re.compile(  # counts that may differ, and why
    "ngeom|nmesh.*|npolygonmax|nbvh.*|noct"  # geoms that touch nothing are left out
    "|nC"  # sparsity of the mass matrix
    "|nsensor.*"  # not imported, see `NewtonSim`
    "|ncam|nlight|nmat|ntex.*|nskin.*|nkey|nuser.*|nnumeric.*|ntuple.*"  # unused by physics
    "|nnames.*|npaths|nbuffer|narena|nconmax|njmax"  # names and memory
)
# Kind of element by the prefix of an array's name, and the arrays that contain each element's first row.
_KINDS = {"jnt": "joint", "dof": "joint", "qpos": "joint", "wrap": "tendon", "eq": "equality"}
_KINDS |= {name: name for name in ("body", "tendon", "pair", "exclude", "actuator", "geom", "site")}
_FIRST = {"dof": "jnt_dofadr", "qpos": "jnt_qposadr", "wrap": "tendon_adr"}
_NO_LIMIT = 1e5  # Newton uses larger values for no limit
_OTHER_ARRAYS = re.compile(  # arrays that may differ, and why
    r"\w+_(user|group|rgba|matid|width|plugin|sameframe|simple\w*|(geom|bvh|M)adr)|tendon_adr"  # rendering, numbering
    r"|\w+_(invweight0|acc0|M0|length0?|lengthrange|subtreemass)"  # derived from the others
    r"|body_(geomnum|bvhnum|margin)"  # geoms that touch nothing are left out
    r"|geom_(size|dataid|rbound)|site_(type|size)"  # geom boxes are compared; only sensors use site shapes
    r"|\w+_actfrclimited"  # Newton sets a limit that is never reached
    r"|actuator_ctrlspec"  # DC motors, which are rejected
)


def check_import(scene: Scene, solver: Any, num_envs: int) -> None:
    """Raise ConfigError unless the solver's model equals the scene's model, element by element."""
    model, solved, labels = scene.model, solver.mj_model, solver.model.body_label
    same = len(labels) == num_envs * (model.nbody - 1)
    if not same or not all(labels[i].endswith(f"/{model.body(i + 1).name}") for i in range(model.nbody - 1)):
        raise unsupported("Newton's import of this scene has different bodies")
    for name in (model.tendon(i).name for i in range(model.ntendon)):
        if name not in {solved.tendon(i).name for i in range(solved.ntendon)}:
            raise unsupported(f"Newton does not import tendon {name!r}")
    counts = {"ngeom": (solved.ngeom, len(collided_geoms(model)))}
    counts["nfluidshape"] = int(solved.geom_fluid[:, 0].sum()), int(model.geom_fluid[:, 0].sum())
    for name in dir(model):
        prefix, value = name.split("_")[0].removesuffix("0"), getattr(model, name)
        if prefix in _KINDS and isinstance(value, np.ndarray) and not _OTHER_ARRAYS.fullmatch(name):
            _check_array(name, prefix, model, solver)
        elif name[0] == "n" and isinstance(value, int) and not _OTHER_COUNTS.fullmatch(name):
            counts[name] = getattr(solved, name), value
    for name, (got, expected) in counts.items():
        if got != expected:
            raise unsupported(f"Newton imports this scene with {name} = {got}, expected {expected}")
    _check_contacts(model, solver.mjw_model)
    overridden = ("timestep", "iterations", "ls_iterations")
    for name in (name for name in dir(model.opt) if not name.startswith("_") and name not in overridden):
        if not np.allclose(getattr(solved.opt, name), getattr(model.opt, name), rtol=1e-5):
            raise lacks_option(name, getattr(model.opt, name))


def _check_contacts(model: mujoco.MjModel, solved: Any) -> None:
    """Compare the solver's candidate geom pairs with the pairs that can touch under MuJoCo's rules."""
    geoms = collided_geoms(model)
    touch, (first, second) = may_touch(model), (model.pair_geom1, model.pair_geom2)
    touch[first, second] = touch[second, first] = True
    touch, actual = touch[np.ix_(geoms, geoms)], np.zeros((len(geoms), len(geoms)), dtype=bool)
    actual[tuple(solved.nxn_geom_pair_filtered.numpy().reshape(-1, 2).T)] = True
    for a, b in np.argwhere(np.triu(touch != (actual | actual.T), 1)):
        names, fault = " and ".join(repr(model.geom(geoms[i]).name) for i in (a, b)), "lacks" if touch[a, b] else "adds"
        raise unsupported(f"Newton's import of this scene {fault} contact between geoms {names}")


def _array(solver: Any, name: str) -> np.ndarray:
    """Return the first env's values of a model array, as the solver uses them."""
    compiled, array = getattr(solver.mj_model, name), getattr(solver.mjw_model, name, None)
    if array is None or isinstance(array, int | float):
        return compiled
    values = array.numpy()
    return values[0] if values.ndim > compiled.ndim else values


def _check_array(name: str, prefix: str, model: mujoco.MjModel, solver: Any) -> None:
    expected, actual = (np.array(each, dtype=float) for each in (getattr(model, name), _array(solver, name)))
    rows = collided_geoms(model) if prefix == "geom" else np.arange(len(expected))
    expected = expected[rows]
    actual = actual.reshape(expected.shape) if actual.size == expected.size else actual
    if name in ("pair_geom1", "pair_geom2"):
        expected = np.searchsorted(collided_geoms(model), expected)
    if expected.shape != actual.shape or not expected.size:
        return  # `check_import` reports the count
    expected, actual = (values.reshape(len(values), -1) for values in (expected, actual))
    if name.endswith("quat"):  # q and -q are the same orientation
        actual *= np.where((actual * expected).sum(axis=1, keepdims=True) < 0.0, -1.0, 1.0)
    if name.endswith("range"):
        for each, values in ((model, expected), (solver.mj_model, actual)):
            limited = getattr(each, name.replace("range", "limited")) != 0
            values[~limited | (np.abs(values) > _NO_LIMIT).all(axis=1)] = 0.0
    rtol = 1e-3 if getattr(model, name).dtype.kind == "f" else 0.0
    wrong = np.flatnonzero(~np.isclose(actual, expected, rtol=rtol, atol=1e-6).all(axis=1))
    if len(wrong):
        row, kind = int(wrong[0]), _KINDS[prefix]
        owner = int(rows[row])
        if prefix in _FIRST:
            owner = int(np.searchsorted(getattr(model, _FIRST[prefix]), row, side="right")) - 1
        element = f"{kind} {getattr(model, kind)(owner).name or owner!r}"
        got, wanted = (" ".join(f"{value:g}" for value in values[row]) for values in (actual, expected))
        raise unsupported(f"Newton imports {element} with {name} = {got}, expected {wanted}")
