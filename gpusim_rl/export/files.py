"""The files of an exported policy: written to a folder of their own, compared with the policy, then put in place."""

from __future__ import annotations

import copy
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import mujoco
import torch

from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError
from gpusim_rl.export import parity
from gpusim_rl.export.card import describe
from gpusim_rl.export.controls import measure
from gpusim_rl.export.model import ExportedPolicy, write_int8, write_onnx, write_torchscript
from gpusim_rl.files.paths import free_name
from gpusim_rl.files.safe_open import temporary_name
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.sim import Scene
from gpusim_rl.sim.option import solver_limits
from gpusim_rl.spaces import MultiDiscrete
from gpusim_rl.view.player import Player

CARD, ONNX, INT8, TORCHSCRIPT = "policy.json", "policy.onnx", "policy.int8.onnx", "policy.ts"
SCENE, SCENE_XML = "scene.mjb", "scene.xml"
NUM_ENVS = 16
"""Envs in which controls are measured."""
SEED = 0


def write_all(
    name: str,
    out: Path | None,
    *,
    overwrite: bool = False,
    int8: bool = True,
    trust: bool = False,
    config_dir: str | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Exports the policy of a run.

    Args:
        name: Run folder, checkpoint, or task (its latest run).
        out: Folder to write; None is `export` in the run's folder, or `export-2` where that exists.
        overwrite: Whether to replace the files of a folder that exists.
        int8: Whether to write a second ONNX file, with 8-bit weights.
        trust: Whether to import the classes that the run names.
        config_dir: Folder of the user's with more tasks.

    Returns:
        The folder, and the card.

    Raises:
        ConfigError: There is no such run, the folder cannot be written, or a file is not the policy.
    """
    with closing(Player.open(name, num_envs=NUM_ENVS, plays_on="mujoco", trust=trust, config_dir=config_dir)) as player:
        assert player.run_dir is not None
        default = player.run_dir / "export"
        folder = out or (default if overwrite else free_name(default))
        temporary = temporary_name(folder)
        try:
            temporary.mkdir()
            card = _write(player, temporary, int8=int8)
            if not folder.exists():
                temporary.rename(folder)
            else:
                for file in temporary.iterdir():
                    file.replace(folder / file.name)
        except OSError as error:
            raise ConfigError(f"--out {folder}: cannot write there: {error.strerror or error}") from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder, card


def _write(player: Player, folder: Path, *, int8: bool) -> dict[str, Any]:
    """Writes all files into an empty folder; returns the card."""
    env, policy = player.env, player.policy
    assert policy is not None
    control = clip_observations = clip_actions = None
    if isinstance(env, VecEnv):
        control, clip_observations = measure(env, SEED), env.cfg.clip_observations
        clip_actions = None if isinstance(env.action_space, MultiDiscrete) else env.cfg.clip_actions
    model = ExportedPolicy(policy.to("cpu"), clip_observations, clip_actions, control).eval()
    size = env.obs_sizes["policy"]
    write_onnx(model, size, folder / ONNX)
    write_torchscript(model, size, folder / TORCHSCRIPT)
    files = {"onnx": ONNX, "torchscript": TORCHSCRIPT}
    if int8:
        write_int8(folder / ONNX, folder / INT8)
        files["int8"] = INT8
    card = {**describe(player, model, control), "files": dict(files), **_compared(model, player, folder, files)}
    if isinstance(env, VecEnv):
        scene = env.sim.scene
        compiled = copy.copy(scene.model)
        cfg = build(SimConfig, player.settings["sim"], "sim")
        compiled.opt.iterations, compiled.opt.ls_iterations = solver_limits(compiled.opt, cfg)
        card["files"] |= _write_scene(scene, compiled, folder)
    (folder / CARD).write_text(json.dumps(card, indent=2, allow_nan=False) + "\n")
    return card


def _write_scene(scene: Scene, model: mujoco.MjModel, folder: Path) -> dict[str, str]:
    """Writes the compiled model, and its source where that needs no other file; returns the files by kind.

    `scene.mjb` is the model itself, with meshes and all digits, but only the version of MuJoCo that wrote it loads it.
    `scene.xml` can be read and is loaded by other versions, but it has six digits: 1/120 s is 0.00833333 s in it.
    """
    mujoco.mj_saveModel(model, str(folder / SCENE), None)
    spec = scene.spec.copy()
    spec.option.iterations, spec.option.ls_iterations = model.opt.iterations, model.opt.ls_iterations
    spec.compile()
    xml = spec.to_xml()
    if 'file="' in xml:
        return {"scene": SCENE}
    (folder / SCENE_XML).write_text(xml)
    return {"scene": SCENE, "scene_xml": SCENE_XML}


def _compared(model: ExportedPolicy, player: Player, folder: Path, files: dict[str, str]) -> dict[str, Any]:
    """Returns errors and latencies of the files."""
    sizes = player.env.obs_sizes
    exact = parity.torch_function(model, sizes)
    state = tuple(layers.numpy() for layers in model.initial_state(1))
    obs = parity.random_observations(model.policy, sizes["policy"], SEED)
    errors, times, threads = {}, {}, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for kind, file in files.items():
            read = parity.torchscript_function if kind == "torchscript" else parity.onnx_function
            function = read(folder / file)
            result = parity.compare(exact, function, obs, state, parity.error_units(model))
            if kind != "int8":
                parity.require(result, file)
            errors[kind] = {"max_error": result.max_error, "borders": result.borders}
            times[kind] = parity.latency_us(function, (obs[:1], *state))
        times["torch"] = parity.latency_us(exact, (obs[:1], *state))
    finally:
        torch.set_num_threads(threads)
    return {
        "parity": {"observations": len(obs), "tolerance": parity.TOLERANCE, "files": errors},
        "latency_us": {"calls": parity.CALLS, "threads": 1, "batch": 1, "median": times},
    }
