"""The scene as plain MuJoCo loads it."""

from __future__ import annotations

from pathlib import Path

import mujoco

from gpusim_rl.sim import Scene

EXACT, READABLE = "scene.mjb", "scene.xml"


def write_scene(scene: Scene, model: mujoco.MjModel, folder: Path) -> dict[str, str]:
    """Writes the compiled model, and its source where that needs no other file.

    `scene.mjb` is the model itself, with meshes and all digits, but only the version of MuJoCo that wrote it loads it.
    `scene.xml` can be read and is loaded by other versions, but it has six digits: 1/120 s is 0.00833333 s in it.

    Args:
        scene: Of the task.
        model: Of the scene, with the options that the run had.
        folder: Where to write.

    Returns:
        Names of the files, by kind.
    """
    mujoco.mj_saveModel(model, str(folder / EXACT), None)
    spec = scene.spec.copy()
    spec.option.iterations, spec.option.ls_iterations = model.opt.iterations, model.opt.ls_iterations
    spec.compile()
    xml = spec.to_xml()
    if 'file="' in xml:
        return {"scene": EXACT}
    (folder / READABLE).write_text(xml)
    return {"scene": EXACT, "scene_xml": READABLE}
