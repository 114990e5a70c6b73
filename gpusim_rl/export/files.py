"""Export of a policy: write all files to a temporary folder, check them, then move them into place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from gpusim_rl.env import VecEnv
from gpusim_rl.env.encoded_env import EncodedEnv
from gpusim_rl.errors import ConfigError, warn
from gpusim_rl.export import CARD, SOURCE, parity
from gpusim_rl.export.card import describe
from gpusim_rl.export.controls import measure
from gpusim_rl.export.encoded_policy import EncodedPolicy
from gpusim_rl.export.joint_order import joint_order
from gpusim_rl.export.model import ExportedPolicy, write_int8, write_numpy, write_onnx, write_torchscript
from gpusim_rl.export.scene_file import LICENCE, SCENE, needs, write_licence, write_scene
from gpusim_rl.files.safe_open import free_name, temporary_name
from gpusim_rl.learn.pretrained import Pretrained
from gpusim_rl.sim.option import solver_limits
from gpusim_rl.spaces import MultiDiscrete
from gpusim_rl.view.player import Player

ONNX, INT8, TORCHSCRIPT = "policy.onnx", "policy.int8.onnx", "policy.ts"
NUMPY, RUNTIME = "policy.npz", "policy.py"
OPTIONAL = (  # not in every export: other formats, results for the replaced policy, scene.mjb of older versions
    *(INT8, TORCHSCRIPT, NUMPY, SOURCE, LICENCE, "scene.mjb", "contract.yaml"),
    *("stress.json", "stress.png", "transfer.json"),
)
NUM_ENVS = 16  # envs in which controls are measured
SEED = 0


def write_all(
    name: str,
    out: Path | None,
    *,
    overwrite: bool = False,
    int8: bool = True,
    order: str | None = None,
    trust: bool = False,
    config_dir: str | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Export the policy of a run; return the folder and the card.

    Args:
        name: Run folder, checkpoint, or task (its latest run).
        out: Output folder; default `export` or `export-<order>` in the run folder, numbered if it exists.
        overwrite: Whether to replace an existing folder's files.
        int8: Whether to also write an 8-bit ONNX file.
        order: Vendor of the joint order, a key of `ORDERS`; None: the scene's order.
        trust: Whether to allow importing any class in the run's settings.
        config_dir: User's folder with additional tasks.

    Raises:
        ConfigError: There is no such run, the folder is not writable, or a file does not match the policy.
    """
    with closing(
        Player.open(name, num_envs=NUM_ENVS, replay_sim="mujoco", trust=trust, config_dir=config_dir)
    ) as player:
        assert player.run_dir is not None
        default = player.run_dir / ("export" if order is None else f"export-{order}")
        folder = out or (default if overwrite else free_name(default))
        if out is None and folder != default:
            warn(f"{default} exists; writing {folder.name} next to it. Use --overwrite to replace it")
        with replacing_files(folder) as temporary:
            card = _write(player, temporary, int8, order)
    return folder, card


@contextmanager
def replacing_files(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; at the end of the block its files become, or replace, those of an export folder.

    Raises:
        ConfigError: A folder is not writable.
    """
    temporary = temporary_name(folder)
    try:
        temporary.mkdir()
        yield temporary
        if not folder.exists():
            temporary.rename(folder)
            return
        for name in OPTIONAL:  # leftovers of an older export
            (folder / name).unlink(missing_ok=True)
        for file in sorted(temporary.iterdir()):
            if file.is_dir():
                shutil.rmtree(folder / file.name, ignore_errors=True)
            file.replace(folder / file.name)
    except OSError as error:
        raise ConfigError(f"cannot write: {error.strerror or error}", key=f"--out {folder}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(player: Player, folder: Path, int8: bool, vendor: str | None) -> dict[str, Any]:
    env, policy = player.env, player.policy
    assert policy is not None
    if isinstance(player.observed, EncodedEnv):
        encoder, frames = player.observed.encoder, player.observed.frames
        assert isinstance(encoder, Pretrained)
        policy = EncodedPolicy(policy, encoder, frames)
    control = clip_observations = clip_actions = None
    start = {}
    if isinstance(env, VecEnv):
        sim: Any = env.sim
        start = {"start": {"qpos": sim.qpos[0].tolist(), "qvel": sim.qvel[0].tolist()}}  # random initial state
        control, clip_observations = measure(env, SEED), env.cfg.clip_observations
        clip_actions = None if isinstance(env.action_space, MultiDiscrete) else env.cfg.clip_actions
    order = None if vendor is None else joint_order(vendor, env, control)
    if order is not None and control is not None:
        control = order.control(control)
    model = ExportedPolicy(policy.to("cpu"), clip_observations, clip_actions, control, order, env.images).eval()
    size = env.obs_sizes["policy"]
    write_onnx(model, size, folder / ONNX)
    write_torchscript(model, size, folder / TORCHSCRIPT)
    files = {"onnx": ONNX, "torchscript": TORCHSCRIPT}
    if int8:
        write_int8(folder / ONNX, folder / INT8)
        files["int8"] = INT8
    if write_numpy(folder / ONNX, folder / NUMPY):
        files["numpy"] = NUMPY
    shutil.copy(Path(__file__).with_name(RUNTIME), folder)
    compared = _compared(model, player, folder, files)
    if "refused" in compared["parity"]["files"].get("int8", {}):
        del files["int8"]
    card = {**describe(player, model, control, order), **start, "files": {**files, "runtime": RUNTIME}, **compared}
    if isinstance(env, VecEnv):
        spec, limits = env.sim.scene.spec.copy(), solver_limits(env.sim.scene.model.opt, player.spec.cfg.sim)
        spec.option.iterations, spec.option.ls_iterations = limits
        card["files"]["scene"] = SCENE
        card["scene_needs_mujoco"] = needs(write_scene(spec, folder))
        write_licence(env.sim.scene, folder)
    (folder / CARD).write_text(json.dumps(card, indent=2, allow_nan=False) + "\n")
    return card


def _compared(model: ExportedPolicy, player: Player, folder: Path, files: dict[str, str]) -> dict[str, Any]:
    sizes = player.env.obs_sizes
    exact = parity.torch_function(model, sizes)
    state = tuple(layers.numpy() for layers in model.initial_state(1))
    inputs = parity.random_inputs(model, sizes["policy"], SEED)
    one = (*(values[:1] for values in inputs), *state)
    errors, times, threads = {}, {}, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for kind, file in files.items():
            function = parity.READ.get(kind, parity.onnx_function)(folder / file)
            result = parity.compare(exact, function, inputs, state, parity.error_units(model))
            errors[kind] = {"max_error": result.max_error, "borders": result.borders}
            if kind != "int8":
                parity.require(result, file)
            elif not parity.usable_int8(result, isinstance(player.env.action_space, MultiDiscrete)):
                counts = f"{result.others} of {result.observations} actions differ"
                warn(f"skipping {file}: 8-bit weights cause errors up to {result.max_error:.2g}, and {counts}")
                errors[kind]["refused"] = True
                (folder / file).unlink()
                continue
            times[kind] = parity.latency_us(function, one)
        times["torch"] = parity.latency_us(exact, one)
    finally:
        torch.set_num_threads(threads)
    return {
        "parity": {"observations": len(inputs[0]), "tolerance": parity.TOLERANCE, "files": errors},
        "latency_us": {"calls": parity.CALLS, "threads": 1, "batch": 1, "median": times},
    }
