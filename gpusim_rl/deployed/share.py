"""Offline HTML page in which a visitor drives an exported policy: MuJoCo in WebAssembly, scene, policy, controls."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from gpusim_rl.deployed import browser_mujoco
from gpusim_rl.deployed.walkers import Walkers, reading
from gpusim_rl.errors import ConfigError, first_line, say
from gpusim_rl.export.policy import OPERATIONS, plain_function
from gpusim_rl.export.scene_file import LICENCE
from gpusim_rl.files import budgets, npz_file
from gpusim_rl.files.safe_open import load_json, read_bytes
from gpusim_rl.sim.robot_xml import bounded_memory
from gpusim_rl.view import looks

MB = 1e6
MAX_HZ, MAX_NUMBERS = 1000.0, 100_000  # control rate and observation size: a visitor's browser must not freeze
PAGE = browser_mujoco.FOLDER
SCRIPTS = ("draw.js", "robot.js", "walk.js")
LACKING = {"ArgMax"}  # operations of policy.py that robot.js does not have
LINKED = re.compile(rb"""\bfile\s*=\s*["']([^"']*)""")


def page(folder: Path, most_mb: float) -> str:
    """Return the page of an export folder, which may be untrusted: nothing in it is executed, here or by the page.

    Raises:
        ConfigError: The folder is no export, its policy or scene does not work in a browser, or the page is too large.
    """
    with reading(folder):
        card = load_json(folder / "policy.json")
        check(card)
        npz = folder / Path(card["files"]["numpy"]).name
        graph, weights = network(npz)
        scene = {name: packed(content) for name, content in scene_files(folder, card["files"]["scene"]).items()}
    walkers = Walkers(folder, 1)  # checks rates, sources, joints, actuators and the scene
    with reading(folder), bounded_memory():  # an operator that robot.js computes differently is found by the page
        seen = np.random.default_rng(0).standard_normal(card["observation"]["size"]).round(3)
        [expected], *_ = plain_function(read_bytes(npz))({"obs": seen[None].astype(np.float32)})
        graph["example"] = [seen.tolist(), expected.tolist()]
        texts = {"card": json.dumps(card, allow_nan=False), "graph": json.dumps(graph, allow_nan=False)}
        title = html.escape(str(card["task"]).encode(errors="replace").decode())
    meshes, licence = looks.for_page(walkers.model)
    licences = [*[folder / LICENCE] * (folder / LICENCE).is_file(), PAGE / "LICENSE.mujoco"]
    texts["licence"] = "\n\n".join(read_bytes(file).decode(errors="replace") for file in licences) + licence
    parts = {name: packed(text.encode()) for name, text in texts.items()}
    parts |= {name: packed(content) for name, content in {"weights": weights, **meshes}.items()}
    # No tag inside the data ends its script early.
    data = json.dumps({**parts, **browser_files(), "scene": scene}).replace("<", "\\u003c")
    script = "\n".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    texts = {"title": title, "script": f'"use strict";\n{script}', "data": data}
    made = re.sub(r"\{\{(\w+)\}\}", lambda found: texts[found[1]], (PAGE / "walk.html").read_text(encoding="utf-8"))
    if len(made) > most_mb * MB:
        sizes = {f"the scene's {name}": len(text) for name, text in scene.items()}
        name, size = max({**sizes, "the policy": len(parts["weights"])}.items(), key=lambda item: item[1])
        problem = f"the page would have {len(made) / MB:.1f} MB, of which {name} has {size / MB:.1f}"
        hint = "Try fewer or coarser meshes, or a larger --max-mb"
        raise ConfigError(problem, key=str(folder), expected=f"at most {most_mb:g} MB", hint=hint)
    return made


def check(card: dict[str, Any]) -> None:
    """Raise ConfigError if a browser cannot run the card's policy."""
    problem, version = "", card.get("scene_needs_mujoco")
    size, terms = card["observation"]["size"], card["observation"].get("terms") or []
    sizes = [term["size"] * term["history"] for term in terms]
    if card["recurrent_state"]:
        problem = "recurrent policies do not run in the page"
    elif "numpy" not in card["files"]:
        problem = "the network has operations without a numpy version, which do not run in the page"
    elif version and [*map(int, version.split("."))] > [*map(int, browser_mujoco.VERSION.split("."))]:
        problem = f"the scene needs MuJoCo {version}, the page has {browser_mujoco.VERSION}"
    elif card["control_hz"] > MAX_HZ or size > MAX_NUMBERS:
        problem = f"the page allows {MAX_HZ:g} control steps a second and {MAX_NUMBERS} observations"
    elif min(sizes, default=0) < 1 or sum(sizes) != size:
        problem = f"the terms have {sum(sizes)} numbers, the observation {size}"
    if problem:
        raise ConfigError(problem)


def network(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return a policy.npz as a graph with its small arrays as lists, and its float arrays as float32 bytes."""
    arrays, _ = npz_file.load(path, budgets.SETTINGS_BYTES * 64)
    graph = json.loads(str(arrays.pop("graph")))
    if unknown := sorted({name for name, *_ in graph["nodes"]} - (OPERATIONS.keys() - LACKING)):
        raise ConfigError(f"the page has no operation {', '.join(unknown)}")
    described, weights = {}, bytearray()
    for name, array in arrays.items():
        described[name] = {"shape": list(array.shape)}
        if array.dtype.kind == "f":
            described[name]["start"] = len(weights) // 4
            weights += np.ascontiguousarray(array, "<f4").tobytes()
        else:
            described[name]["list"] = array.ravel().tolist()
    return {"nodes": graph["nodes"], "outputs": graph["outputs"], "arrays": described}, bytes(weights)


def scene_files(folder: Path, scene: str) -> dict[str, bytes]:
    """Return `scene.xml` and the files that it names, which must lie in `assets`."""
    content = read_bytes(folder / Path(scene).name, budgets.XML_BYTES)
    files = {"scene.xml": content}
    for link in {html.unescape(found.decode()) for found in LINKED.findall(content)}:
        if not re.fullmatch(r"assets/[\w-][\w.-]*", link):
            raise ConfigError(f"{scene} names the file {link!r}, expected one in assets/")
        files[link] = read_bytes(folder / link, budgets.ASSET_BYTES)
    return files


def browser_files() -> dict[str, str]:
    """Return MuJoCo's code and its WebAssembly, packed; download them first in a checkout."""
    if not all(file.is_file() for file in browser_mujoco.FILES.values()):
        say(f"downloading MuJoCo {browser_mujoco.VERSION} for browsers (5.5 MB)", file=sys.stderr)
    try:
        browser_mujoco.bring()
        code, wasm = (browser_mujoco.FILES[name].read_bytes() for name in ("mujoco.js", "mujoco.wasm"))
    except OSError as error:
        problem = f"MuJoCo for browsers is not here, and cannot be downloaded: {first_line(error)}"
        hint = "Try a wheel of gpusim-rl, which has it, or installing npm"
        raise ConfigError(problem, key="share", hint=hint) from None
    text = gzip.decompress(code).decode()
    for old, new in (  # a module of its own file becomes a script of a page that forbids `eval`
        ("export default loadMujoco;", ""),
        ("import.meta.url", '"file:///mujoco.js"'),
        ("new Function(", "inlineFunction("),
    ):
        if old not in text:
            raise AssertionError(f"mujoco.js has no {old!r}")
        text = text.replace(old, new)
    return {"code": packed(text.encode()), "wasm": base64.b64encode(wasm).decode()}


def packed(content: bytes) -> str:
    """Return bytes compressed by gzip, as base64."""
    return base64.b64encode(gzip.compress(content, mtime=0)).decode()
