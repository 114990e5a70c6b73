"""MJCF scene of an exported policy, which other MuJoCo versions compile to the same model."""

from __future__ import annotations

import ctypes
from pathlib import Path
from xml.etree import ElementTree

import mujoco
import numpy as np
import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene
from gpusim_rl.sim.actuators import is_dc_motor, whole_steps

SCENE, ASSETS, LICENCE = "scene.xml", "assets", "LICENSE.robot"
DIGITS, ALL_DIGITS = 6, 17
"""Digits that MuJoCo writes by default, and digits of a double."""
DC_MOTORS, DELAYS = "3.17", "3.5"  # first MuJoCo versions with DC motors, and with delays, in MJCF
_FILES = {"mesh": "mesh", "hfield": "hfield", "tex": "texture", "skin": "skin"}  # prefix in the model: tag in the XML
_FOLDERS = ("meshdir", "texturedir", "assetdir")
_CONTROLLED = ("gainprm", "biasprm", "gear", "ctrlrange", "forcerange", "delay")


def write_scene(spec: mujoco.MjSpec, folder: Path) -> mujoco.MjModel:
    """Write `scene.xml` in full precision, and `assets` with meshes, textures and height fields; return the model.

    Delays are rounded by `whole_steps` before compilation. Raise ConfigError if a file is missing or the model differs.
    """
    for actuator in spec.actuators:
        if actuator.nsample and not actuator.interp:
            actuator.delay = whole_steps(torch.tensor(actuator.delay), spec.option.timestep).item()
    model = spec.compile()
    xml, digits = _xml(spec)
    root = ElementTree.fromstring(xml)
    for kind, tag in _FILES.items():
        for i, start in enumerate(getattr(model, f"{kind}_pathadr").tolist()):
            name = mujoco.mj_id2name(model, getattr(mujoco.mjtObj, f"mjOBJ_{tag.upper()}"), i)
            [element] = [item for item in root.iterfind(f"asset/{tag}") if item.get("name") == name] or [None]
            if element is None or not (start >= 0 or "elevation" in element.attrib):
                continue
            if start < 0:
                content, end = _height_field(model, i), ".hfield"
                del element.attrib["elevation"]
            else:
                path = model.paths[start:].split(b"\0")[0].decode()
                content, end = _content(spec, path), Path(path).suffix
            file = folder / ASSETS / f"{tag}{i}{end}"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)
            element.set("file", f"{ASSETS}/{file.name}")
    for compiler in root.iter("compiler"):  # files have moved
        compiler.attrib = {key: value for key, value in compiler.attrib.items() if key not in _FOLDERS}
    if needs(model) != DC_MOTORS:  # redundant for other actuators, and unknown to older versions
        for element in root.iter("general"):
            element.attrib.pop("input", None)
    ElementTree.indent(root)
    (folder / SCENE).write_text(ElementTree.tostring(root, "unicode") + "\n")
    read = mujoco.MjModel.from_xml_path(str(folder / SCENE))
    for field in ("nq", "nv", "nu", "nsensordata", "body_mass", *(f"actuator_{name}" for name in _CONTROLLED)):
        if not np.allclose(getattr(read, field), getattr(model, field), rtol=10.0 ** (3 - digits), atol=1e-12):
            raise ConfigError(f"MuJoCo {mujoco.__version__} reads back a different {field}", key=SCENE)
    return model


def write_licence(scene: Scene, folder: Path) -> None:
    """Write the licences of the scene's robot models that ship with the package, if any, as `LICENSE.robot`."""
    licences = dict.fromkeys(file.with_name("LICENSE") for file in scene.files if assets_dir() in file.parents)
    if texts := [file.read_text(encoding="utf-8") for file in licences if file.is_file()]:
        (folder / LICENCE).write_text("\n".join(texts), encoding="utf-8")


def needs(model: mujoco.MjModel) -> str | None:
    """Return the oldest MuJoCo version that supports all features of the actuators; None if 3.3 suffices."""
    if any(is_dc_motor(model, i) for i in range(model.nactuator)):
        return DC_MOTORS
    return DELAYS if (model.actuator_delay > 0.0).any() else None


def _xml(spec: mujoco.MjSpec) -> tuple[str, int]:
    """Return MJCF and its number of digits: 17 if MuJoCo's private precision setting is available, else 6."""
    bindings = ctypes.CDLL(mujoco._specs.__file__)  # pyright: ignore[reportAttributeAccessIssue]
    choose = getattr(bindings, "_mjPRIVATE__set_xml_precision", None)
    if choose is None:
        return spec.to_xml(), DIGITS
    choose(ALL_DIGITS)
    try:
        return spec.to_xml(), ALL_DIGITS
    finally:
        choose(DIGITS)


def _content(spec: mujoco.MjSpec, path: str) -> bytes:
    held = {name: content for name, content in spec.assets.items() if path.endswith(name)}
    try:
        content = next(iter(held.values())) if held else Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read this scene file: {error.strerror or error}", key=path) from None
    return content.encode() if isinstance(content, str) else content


def _height_field(model: mujoco.MjModel, i: int) -> bytes:
    """Return a height field in MuJoCo's format: rows, columns, float32 heights."""
    rows, columns, start = (int(getattr(model, f"hfield_{name}")[i]) for name in ("nrow", "ncol", "adr"))
    heights = model.hfield_data[start : start + rows * columns].astype(np.float32)
    return np.array([rows, columns], dtype=np.int32).tobytes() + heights.tobytes()
