"""Load collections of robot files and compare their motion with plain MuJoCo; replace their rows in robots.json.

    python benchmarks/robots/robots.py erd=FOLDER menagerie=FOLDER
    python benchmarks/robots/robots.py menagerie=FOLDER --simulators mujoco,mjwarp,newton --one-per-folder --most 40
    python benchmarks/robots/robots.py bullet=FOLDER --skip random_urdfs --jointed  # only files with movable joints

Every file is loaded in a separate process. `task`: true if `new_task` can write a task from a URDF, else the error.
`loads`: true if a scene loads the file and a simulator steps it; if not, `line` is the error. `apart`: maximum
difference from mj_step [m, rad, or quaternion component] after 50 control steps of 4 physics steps with the same random
controls; null if plain MuJoCo rejects the file (`plain` is its error). For URDF, plain MuJoCo gets the scene's mesh
paths, compiler settings, excluded pairs and repaired masses; objects without joints get a free joint. `chaos`: maximum
difference between runs of plain MuJoCo from states 1e-7 apart; above 1e-3, float32 simulators are not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import multiprocessing
import queue
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

STEPS, SUBSTEPS, CHAOS = 50, 4, 1e-3
INERTIAL = ("body_mass", "body_inertia", "body_ipos", "body_iquat")
TOLERANCE = {"mujoco": 1e-5, "mjwarp": 1e-2, "newton": 1e-2}
"""Maximum `apart` of matching robots: Warp simulators use float32, and their solvers stop earlier."""


def files_of(folder: Path, skip: str, jointed: bool, one_per_folder: bool) -> list[Path]:
    """Return the robot files of a collection: URDF files, and MJCF files that are models but not scenes."""
    from gpusim_rl.sim.robot_xml import parse, read_content

    found: list[Path] = []
    for file in sorted(folder.rglob("*")):
        if file.suffix not in (".urdf", ".xml") or (skip and skip in str(file)) or file.stem.startswith("scene"):
            continue
        try:
            root = parse(read_content(file))
        except ValueError:
            root = ElementTree.Element("robot" if file.suffix == ".urdf" else "")
        if root.tag not in ("robot", "mujoco") or (root.tag == "mujoco" and root.find("worldbody/body") is None):
            continue
        moves = any(joint.get("type", "hinge") != "fixed" for joint in (*root.iter("joint"), *root.iter("freejoint")))
        if moves or not jointed:
            found.append(file)
    if one_per_folder:
        first: dict[Path, Path] = {}
        for file in sorted(found, key=lambda file: len(file.name)):
            first.setdefault(file.parent, file)
        found = sorted(first.values())
    return found


def plain_model(file: Path, free: bool, excludes: Sequence[tuple[str, str]] = ()) -> Any:
    """Compile a file with MuJoCo, without this package's readers; `excludes` are link pairs."""
    import mujoco

    from gpusim_rl.sim.robot_xml import root_tag
    from gpusim_rl.sim.urdf import LEAST_INERTIA, LEAST_MASS, _find

    if root_tag(file) != "robot":
        return mujoco.MjModel.from_xml_path(str(file))
    root = ElementTree.parse(file).getroot()
    element = root.find("mujoco")
    element = ElementTree.SubElement(root, "mujoco") if element is None else element
    compiler = element.find("compiler")
    compiler = ElementTree.SubElement(element, "compiler") if compiler is None else compiler
    folder = file.parent / compiler.attrib.pop("meshdir", ".")
    bounds = {"balanceinertia": "true", "boundmass": f"{LEAST_MASS:g}", "boundinertia": f"{LEAST_INERTIA:g}"}
    compiler.attrib = {**bounds, **compiler.attrib, "strippath": "false", "fusestatic": "false"}
    compiler.set("discardvisual", "true")
    for mesh in root.iterfind("link/collision/geometry/mesh"):
        mesh.set("filename", str(_find(mesh.get("filename", ""), file, folder, {}, [])))
    spec = mujoco.MjSpec.from_string(ElementTree.tostring(root, encoding="unicode"))
    for body in spec.worldbody.bodies[:1] if free else ():
        body.add_freejoint()
    for one, two in excludes:
        spec.add_exclude(bodyname1=one, bodyname2=two)
    return spec.compile()


def run(file: Path, simulator: str) -> dict[str, Any]:
    """Load, step and compare a robot file; return its row (see the module docstring)."""
    import mujoco
    import numpy as np
    import torch

    from gpusim_rl.api import load_spec
    from gpusim_rl.errors import ConfigError, TaskError
    from gpusim_rl.settings.compose import compose
    from gpusim_rl.sim import Scene, SimChoice, make_sim
    from gpusim_rl.sim.robot_file import one_line

    row: dict[str, Any] = {"loads": False, "apart": None}
    if file.suffix == ".urdf" and simulator == "mujoco":
        with tempfile.TemporaryDirectory() as folder:
            row["task"] = write_task(file, folder)
    plain, free = None, False
    try:
        try:
            plain = plain_model(file, False)
            if free := plain.njnt == 0:
                plain = plain_model(file, True)
        except (ValueError, TaskError, ElementTree.ParseError) as error:
            row["plain"] = one_line(error)
            scene = Scene(500)
            scene.add("robot", file)
            free = scene.model.njnt == 0
        step = 0.002 if plain is None else plain.opt.timestep
        scene = Scene(1.0 / step)
        scene.add("robot", file, fixed_base=False if free else None)
        choice = SimChoice(simulator, torch.device("cpu"), "benchmark")
        cfg = load_spec(compose([f"sim={simulator}"]), []).cfg.sim
        sim = make_sim(scene, choice, 1, cfg)
    except (ConfigError, TaskError) as error:
        return row | {"line": one_line(error)}
    model, random = scene.model, np.random.default_rng(0)
    pairs = [(one.bodyname1.split("/")[-1], one.bodyname2.split("/")[-1]) for one in scene.spec.excludes]
    if plain is not None and pairs and file.suffix == ".urdf":
        plain = plain_model(file, free, pairs)
    data = other = None
    if plain is not None and plain.nq == model.nq and plain.nu == model.nu:
        plain.opt.timestep = model.opt.timestep
        data = mujoco.MjData(plain)
        if plain.nbody == model.nbody:
            row["mended"] = not all(np.allclose(getattr(plain, key), getattr(model, key)) for key in INERTIAL)
            if row["mended"]:
                for key in INERTIAL:
                    getattr(plain, key)[:] = getattr(model, key)
                mujoco.mj_setConst(plain, data)
        data.qpos[:] = sim.qpos[0].numpy()
        other = mujoco.MjData(plain)
        other.qpos[:] = data.qpos + 1e-7
    low, high = np.where(model.actuator_ctrllimited[:, None], model.actuator_ctrlrange, [-0.3, 0.3]).T
    for _ in range(STEPS):
        control = random.uniform(low, high)
        sim.ctrl[:] = torch.tensor(control, dtype=torch.float32)
        sim.step(SUBSTEPS)
        for each in (data, other):
            if each is not None:
                each.ctrl[:] = control.astype(np.float32)
                mujoco.mj_step(plain, each, SUBSTEPS)
    qpos = sim.qpos[0].double().numpy()
    row["loads"] = bool(np.isfinite(qpos).all())
    if not row["loads"]:
        too = ", in plain MuJoCo too" if data is not None and any(each.number for each in data.warning) else ""
        row["line"] = f"the state diverges{too}"
    elif data is not None and other is not None:
        row["chaos"] = float(f"{np.abs(other.qpos - data.qpos).max():.2g}")
        row["apart"] = float(f"{np.abs(qpos - data.qpos).max():.2g}")
    return row


def write_task(file: Path, folder: str) -> bool | str:
    """Return True if `new_task` can write a task from a URDF, else the error message."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
    import new_task  # pyright: ignore[reportMissingImports]

    from gpusim_rl.errors import ConfigError, TaskError

    try:
        new_task.new_task(new_task.parse(["Robot", "--urdf", str(file), "--out", folder]))
    except (ConfigError, TaskError) as error:
        return str(error)
    return True


def row_of(file: Path, simulator: str, seconds: float) -> dict[str, Any]:
    """Run a robot file in a separate process; return its row, also after an exception, a crash or a timeout."""

    def work() -> None:
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                results.put(run(file, simulator))
        except BaseException as error:
            results.put({"loads": False, "apart": None, "traceback": f"{type(error).__name__}: {error}"})

    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=work)
    process.start()
    try:
        return results.get(timeout=seconds)
    except queue.Empty:
        return {"loads": False, "apart": None, "line": f"no result after {seconds:g} s"}
    finally:
        process.kill()
        process.join()


def counts(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Count files, loads, tasks and matches by collection and simulator."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        count = found.setdefault(f"{row['collection']} {row['simulator']}", Counter())
        steady = row["simulator"] == "mujoco" or row.get("chaos", 0.0) <= CHAOS
        compared = row["apart"] is not None and steady
        equal = compared and (row["apart"] or 0.0) <= TOLERANCE[row["simulator"]]
        count.update(files=1, loads=row["loads"], urdf="task" in row, task=row.get("task") is True, equal=equal)
        count.update(compared=compared, traceback="traceback" in row)
    return {key: {name: int(number) for name, number in count.items()} for key, count in found.items()}


def main() -> None:
    """Load and compare the collections; write robots.json."""
    from measuring.checkout import provenance, write

    for module in (
        "gpusim_rl.api",
        "gpusim_rl.sim.mujoco",
        "gpusim_rl.sim.legged",
        "trimesh",
        "collada",
        "scipy.spatial",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)  # import once, before forking

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collections", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--simulators", default="mujoco", help="among mujoco,mjwarp,newton (default: mujoco)")
    parser.add_argument("--skip", default="", help="skip paths that contain this text")
    parser.add_argument("--jointed", action="store_true", help="only files with movable joints")
    parser.add_argument("--one-per-folder", action="store_true", help="only the shortest file name in each folder")
    parser.add_argument("--most", type=int, help="maximum files per collection")
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit per file (default: 600)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    kept = json.loads(args.out.read_text()) if args.out.is_file() else {"robots": []}
    rows, commands = (
        kept["robots"],
        [*kept.get("commands", []), re.sub(r"(?<=[= ])/\S+", "FOLDER", " ".join(["robots.py", *sys.argv[1:]]))],
    )
    head = {**provenance(args.out), "commands": commands}
    head["environment"] |= {"command": f"python benchmarks/robots/{commands[-1]}"}  # without paths of this machine
    head["settings"] = {"steps": STEPS, "substeps": SUBSTEPS, "tolerance": TOLERANCE}
    for item in args.collections:
        name, _, folder = item.partition("=")
        files = files_of(Path(folder), args.skip, args.jointed, args.one_per_folder)[: args.most]
        for simulator in args.simulators.split(","):
            rows = [row for row in rows if (row["collection"], row["simulator"]) != (name, simulator)]
            for file in files:
                row = row_of(file, simulator, args.seconds)
                place = {"collection": name, "file": file.relative_to(folder).as_posix(), "simulator": simulator}
                text = re.sub(r"(?<![\w./:])/[^\s\",;']+/", "", json.dumps(row))  # no paths of this machine
                rows.append({**place, **json.loads(text)})
                print(json.dumps(rows[-1]), flush=True)
                write(args.out, json.dumps({**head, "counts": counts(rows), "robots": rows}, indent=1) + "\n")
    print(json.dumps(counts(rows), indent=1))


if __name__ == "__main__":
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]  # benchmarks/, and the checkout
    main()
