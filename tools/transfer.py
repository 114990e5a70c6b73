"""Evaluate a run in other simulators and physics.

gpusim-rl transfer Go1Velocity                                 the latest run, in all variants
gpusim-rl transfer Go1Velocity --only simulator,friction       some of the variants
gpusim-rl transfer Go1Velocity --num-envs 64 --seconds 10      64 episodes each, of at most 10 s
gpusim-rl transfer runs/Go1Velocity/latest/export              an export folder, in plain MuJoCo
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gpusim_rl.deployed import write_results
from gpusim_rl.errors import ConfigError, TaskError, did_you_mean, first_line, friendly_errors, import_extra, say
from gpusim_rl.export.of_run import is_export, require_onnx
from gpusim_rl.options import Parser
from gpusim_rl.settings.simulators import SIMULATORS
from gpusim_rl.view import arguments
from gpusim_rl.view.text_table import table_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from gpusim_rl.view.player import Player

GROUPS = {
    "simulator": "the other simulators",
    "step": "half and double physics time step",
    "integrator": "the other integrators",
    "cone": "the other friction cones",
    "friction": "all friction x 0.4 to 1.2",
    "mass": "all masses and inertias +-10 %",
    "gains": "servo stiffness and damping +-10 %",
    "effort": "maximum actuator force +-10 %",
    "delay": "actions delayed by 1 to 3 control steps",
    "noise": "5 and 10 % Gaussian noise on observations",
    "trained": "the run's own noise and randomisation",
    "exported": "the ONNX file, with controls mapped to actuators by the names in policy.json",
}
PLAIN = "plain"  # the run's settings in mujoco, without noise and randomisation
LIKELY = 2.0  # a difference of more than two standard errors is unlikely to be chance


@dataclass(frozen=True)
class Variant:
    """Variant of the plain evaluation, with other settings or another simulator."""

    name: str
    group: str
    changes: Mapping[str, Any] = field(default_factory=dict)  # settings by full key, as for `Player.open`
    sim: str = "mujoco"
    factor: float = 1.0  # of what the group names, see `factors`
    reason: str = ""  # why the variant cannot be evaluated


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        transfer(parse(argv))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("transfer", __doc__)
    parser.option("run", "or a folder written by export")
    parser.option("--only", "variants", "Variants", "all of these", metavar="A,B")
    parser.rows["Variants"] += GROUPS.items()
    parser.option("--num-envs", "with an episode each", default=32)
    parser.option("--seconds", note="the task's time limit")
    parser.options("--seed", "--trust", "--config-dir")
    parser.set_defaults(policy="trained", sim=None)
    return parser.parse_args(argv)


def transfer(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Evaluate all variants, print and write the results; return the rows, starting with the plain variant."""
    wanted = list(GROUPS) if args.only is None else args.only.split(",")
    for name in wanted:
        if name not in GROUPS:
            hint = f"{did_you_mean(name, GROUPS)} Available: {', '.join(GROUPS)}"
            raise ConfigError("unknown group of variants", key=f"--only {name}", hint=hint)
    if is_export(args.run):
        return transfer_export(args, wanted)
    import_extra("matplotlib", "view", "transfer")
    with closing(open_player(args, "mujoco", 1, {})) as probe:
        plain, variants = plan(probe, args.seconds)
        run_dir = probe.run_dir
        about = {"checkpoint": str(probe.checkpoint), "iteration": probe.iteration, "task": probe.name}
    assert run_dir is not None
    say(f"{about['checkpoint']}, iteration {about['iteration']}: {args.num_envs} episodes in each variant")
    result, returns = measure(args, Variant(PLAIN, PLAIN), plain)
    rows: list[dict[str, Any]] = [{"variant": PLAIN, "group": PLAIN, **result, "difference": 0.0}]
    for number, variant in enumerate(chosen := [variant for variant in variants if variant.group in wanted], start=1):
        say(f"{number}/{len(chosen)} {variant.name}", file=sys.stderr)
        try:
            if variant.reason:
                raise TaskError(variant.reason)
            result, others = measure(args, variant, plain)
            row = {**result, **difference(others.cpu() - returns.cpu())}
        except Exception as error:  # one failure must not hide the other variants
            row = {"error": first_line(error)}
        rows.append({"variant": variant.name, "group": variant.group, **row})
    say(*table(rows))
    about |= {"seed": args.seed, "num_envs": args.num_envs, "seconds": args.seconds}
    from gpusim_rl.run.console import finite

    figure = draw(rows, f"{about['task']}, iteration {about['iteration']}")
    write_results(run_dir, "transfer", {**about, "rows": [finite(row) for row in rows]}, figure)
    return rows


def transfer_export(args: argparse.Namespace, wanted: Sequence[str]) -> list[dict[str, Any]]:
    """Evaluate an export folder in the groups that plain MuJoCo can vary; print and write falls and velocity errors."""
    from gpusim_rl.deployed.stress import EPISODE_S, ROBOTS, StressTest
    from gpusim_rl.deployed.variants import VARIANTS
    from gpusim_rl.deployed.walkers import Walkers

    groups = [group for group in wanted if group in VARIANTS]
    if not groups:
        raise ConfigError("needs a run", key=f"--only {args.only}", hint=f"Of an export: {', '.join(VARIANTS)}")
    study = StressTest(Walkers(Path(args.run), ROBOTS, args.seed), args.seed)
    results = study.variants(args.num_envs, args.seconds or EPISODE_S, groups)
    rows = [{"variant": row["name"], **row, "velocity_error": error} for row, error in results]
    head = ["variant", "falls", "95 % interval", "velocity error [m/s]"]
    cells = [
        [row["variant"], str(row["falls"]), "{:.1%} to {:.1%}".format(*row["interval"]), f"{row['velocity_error']:.3f}"]
        for row in sorted(rows, key=lambda row: (-row["falls"], -row["velocity_error"]))
    ]
    say(*table_lines([head, *cells], right=head[1:], width=None))
    write_results(Path(args.run), "transfer", {"seed": args.seed, "num_envs": args.num_envs, "rows": rows})
    return rows


def open_player(args: argparse.Namespace, sim: str, num_envs: int, changes: Mapping[str, Any]) -> Player:
    """Open the run; raise ConfigError for envs of another library, whose physics cannot be varied."""
    player = arguments.open_player(args, num_envs=num_envs, replay_sim=sim, changes={"seed": args.seed, **changes})
    from gpusim_rl.env import VecEnv

    if not isinstance(player.env, VecEnv):
        player.close()
        raise ConfigError("envs of another library are not supported", key=player.name)
    return player


def measure(args: argparse.Namespace, variant: Variant, plain: Mapping[str, Any]) -> tuple[dict[str, float], Tensor]:
    """Play a whole episode in every env; return the result of `gpusim_rl.run.evaluation.evaluate`."""
    from gpusim_rl.run.evaluation import evaluate

    with closing(open_player(args, variant.sim, args.num_envs, {**plain, **variant.changes})) as player:
        vary(player.env, variant)
        if variant.group != "exported":
            assert player.policy is not None
            return evaluate(player.observed, player.policy, player.obs)
        with tempfile.TemporaryDirectory() as folder:
            return evaluate(player.env, exported(args, player.env, Path(folder) / "export"), player.obs)


def plan(probe: Player, seconds: float | None) -> tuple[dict[str, Any], list[Variant]]:
    """Return the settings of the plain evaluation, and all variants of the run's task."""
    from gpusim_rl.deployed.variants import VARIANTS, factors, variant_name
    from gpusim_rl.env.task import control_steps

    env: Any = probe.env
    cfg, task = env.cfg, probe.spec.config["task"]
    noise = ("noise", "shift", "brightness")
    sensors = {part: {k: v for k, v in keys.items() if k not in noise} for part, keys in cfg.observations.items()}
    plain = {"task.randomize": False, "task.randomization_params": {}, "task.observations": sensors}
    as_trained = {key: task.get(key.removeprefix("task."), value) for key, value in plain.items()}
    if seconds is not None:
        plain["task.episode_length"] = min(cfg.episode_length, control_steps(seconds, 1.0 / cfg.control_hz))

    variants = [Variant(name, "simulator", sim=name) for name in SIMULATORS if name != "mujoco"]
    for name, factor in (("half time step", 2.0), ("double time step", 0.5)):
        variants.append(Variant(name, "step", {"task.physics_hz": factor * cfg.physics_hz}))
    option = env.sim.scene.model.opt
    for group, names, now in (
        ("integrator", ("euler", "rk4", "implicit", "implicitfast"), option.integrator),
        ("cone", ("pyramidal", "elliptic"), option.cone),
    ):
        variants += [Variant(name, group, {f"sim.{group}": name}) for i, name in enumerate(names) if i != now]
    for group, value in ((group, value) for group, values in VARIANTS.items() for value in values):
        changes, factor, reason = {}, 1.0, ""
        if group == "delay":
            changes = randomized(latency={"range": [int(value)] * 2})
        elif group == "noise":
            noise = {"range": [1.0, value], "operation": "scaling", "distribution": "gaussian"}
            changes = randomized(observations=noise)
        else:
            factor, reason = value, "" if factors(env.sim.scene.model, group, value) else f"no {group} to scale"
        name = variant_name(group, value, cfg.control_hz)
        variants.append(Variant(name, group, changes, factor=factor, reason=reason))
    same = not as_trained["task.randomize"] and as_trained["task.observations"] == sensors
    reason = "the run was trained without noise or randomisation" if same else ""
    variants.append(Variant("as trained", "trained", as_trained, reason=reason))
    variants.append(Variant("exported", "exported"))
    return plain, variants


def randomized(**params: Any) -> dict[str, Any]:
    """Return settings that randomise only `params`; a range with equal ends sets a fixed value."""
    return {"task.randomize": True, "task.randomization_params": params}


def vary(env: Any, variant: Variant) -> None:
    """Scale the physics of all envs, in MuJoCo, by the variant's factor."""
    from gpusim_rl.deployed.variants import factors

    if variant.factor != 1.0:
        for name, factor in factors(env.sim.scene.model, variant.group, variant.factor).items():
            env.sim.expand(name).numpy()[:] *= factor


def exported(args: argparse.Namespace, env: Any, folder: Path) -> Any:
    """Return the policy of an ONNX file; if its card has controls, they replace the task's `apply_action`."""
    require_onnx("exported")
    import torch

    from gpusim_rl.export import files, parity
    from gpusim_rl.sim.actuators import control_names

    _, card = files.write_all(args.run, folder, int8=False, trust=args.trust, config_dir=args.config_dir)
    function, shapes = parity.onnx_function(folder / files.ONNX), [row["shape"] for row in card["recurrent_state"]]
    names, policy = [name for name, _ in control_names(env.sim.scene.model)], SimpleNamespace()
    columns = [names.index(row["name"]) for row in card["actuators"]] if "control" in card else None

    def initial_state(batch: int) -> tuple[Tensor, ...]:
        return tuple(torch.zeros([batch if size == "batch" else size for size in shape]) for shape in shapes)

    def act(obs: dict[str, Tensor], hidden: tuple[Tensor, ...], **_: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        outputs = function(*(value.contiguous().numpy() for value in (obs["policy"], *hidden)))
        action, *rest = map(torch.from_numpy, outputs)
        policy.control = None if columns is None else rest.pop(0)
        return action, tuple(rest)

    def apply_action(_: Tensor) -> None:
        env.sim.ctrl[:, columns] = policy.control

    policy.initial_state, policy.act = initial_state, act
    if columns is not None:
        env.task.apply_action = apply_action
    return policy


def difference(returns: Tensor) -> dict[str, float]:
    """Return mean and standard error of the difference between returns from the same initial states."""
    count = returns.numel()
    error = float(returns.std()) / math.sqrt(count) if count > 1 else math.nan
    return {"difference": float(returns.mean()), "standard_error": error}


def worst_first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without errors, worst first; a non-finite return is the worst."""
    played = [row for row in rows if "error" not in row]
    return sorted(played, key=lambda row: row["difference"] if math.isfinite(row["difference"]) else -math.inf)


def numbers(rows: list[dict[str, Any]]) -> list[str]:
    """Return the names of the other metrics shown: length, task metrics, and divergences if any."""
    own = [name for name in rows[0] if name.startswith("task/")]
    return ["length_mean", *own, *(["diverged"] if any(row.get("diverged") for row in rows) else [])]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table's lines, worst variant first, then a line per failed variant."""
    plain, names = rows[0], numbers(rows)
    head = ["variant", "return", "difference", "chance?", *(name.removeprefix("task/") for name in names)]
    cells = [head]
    for row in worst_first(rows):
        cell = [row["variant"], _cell(row, "return_mean", plain), "", ""]
        if row is not plain:
            cell[2] = f"{row['difference']:+.3g} +- {row['standard_error']:.2g}"
            cell[3] = "" if abs(row["difference"]) > LIKELY * row["standard_error"] else "yes"
        cells.append([*cell, *(_cell(row, name, plain) for name in names)])
    lines = table_lines(cells, right=head[1:], width=None)
    return [*lines, *(f"{row['variant']}: {row['error']}" for row in rows if "error" in row)]


def _cell(row: Mapping[str, Any], name: str, plain: Mapping[str, Any]) -> str:
    if row is plain or not plain[name] or not math.isfinite(row[name]):
        return f"{row[name]:.3g}"
    percent = 100.0 * (row[name] - plain[name]) / abs(plain[name])
    return f"{row[name]:.3g} {percent:+.0f}%" if percent < 1000.0 else f"{row[name]:.3g} x{percent / 100.0 + 1.0:.0f}"


def draw(rows: list[dict[str, Any]], title: str) -> Figure:
    """Return the figure: a panel per metric and a row per variant, with the worst return on top."""
    from matplotlib.figure import Figure

    plain, played = rows[0], worst_first(rows)[::-1]
    names = ["return_mean", *numbers(rows)]
    figure = Figure(layout="constrained", figsize=(3.0 + 2.4 * len(names), 1.6 + 0.25 * len(played)))
    for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
        errors = [row.get("standard_error", 0.0) if name == "return_mean" else 0.0 for row in played]
        values, variants = [row[name] for row in played], [row["variant"] for row in played]
        axes.errorbar(values, variants, xerr=errors, fmt="o", markersize=4)
        axes.axvline(plain[name], color="black", linewidth=0.8, linestyle=":")
        axes.axvspan(0.9 * plain[name], 1.1 * plain[name], color="tab:gray", alpha=0.15, linewidth=0)
        axes.set_title(name.removeprefix("task/").removesuffix("_mean"), fontsize="medium")
        axes.grid(axis="x", alpha=0.3)
    words = f"{plain['episodes']:.0f} episodes each; grey: within 10 % of plain; bars: standard error of the difference"
    figure.suptitle(f"{title}: {words}", fontsize="medium")
    return figure


if __name__ == "__main__":
    sys.exit(main())
