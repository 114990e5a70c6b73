"""Compare our velocity tasks with mjlab's, term by term, in the same states; write mjlab_parity.json.

    python benchmarks/parity/mjlab_parity.py                             # with the recordings in benchmarks/parity
    python benchmarks/parity/mjlab_parity.py --record PATH/bin/python    # record first, with mjlab's Python

mjlab drives its robots with random actions. Both simulations (ours on C MuJoCo, mjlab's on MuJoCo Warp) are set to the
visited states, commands, actions and histories; observations and rewards are compared before and after a control step.
Compiled models are compared by name. Noise, pushes, randomisation and random commands are off.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from measuring.checkout import provenance, write
from parity import mjlab_models

RECORDINGS = Path(__file__).parent
TOLERANCE = 1e-4
"""Tolerance in the unit of the unweighted term; relative if the term is above 1."""

OBSERVATIONS = {
    "base_lin_vel": "lin_vel",
    "base_ang_vel": "ang_vel",
    "projected_gravity": "gravity",
    "joint_pos": "joint_pos",
    "joint_vel": "joint_vel",
    "actions": "actions",
    "command": "command",
    "height_scan": "heights",
    "foot_height": "foot_height",
    "foot_air_time": "air_time",
    "foot_contact": "contact",
    "foot_contact_forces": "contact_force",
}
REWARDS = {
    "track_linear_velocity": "lin_vel",
    "track_angular_velocity": "ang_vel",
    "upright": "upright",
    "pose": "pose",
    "body_ang_vel": "torso_ang_vel",
    "angular_momentum": "angular_momentum",
    "dof_pos_limits": "joint_limits",
    "action_rate_l2": "action_rate",
    "foot_clearance": "foot_clearance",
    "foot_swing_height": "swing_height",
    "foot_slip": "foot_slip",
    "soft_landing": "soft_landing",
    "self_collisions": "self_contact",
    "shank_collision": "shank_contact",
    "trunk_head_collision": "trunk_contact",
}
"""Our reward terms by mjlab's names."""
ENDS = ("fell_over", "illegal_contact")


ROUGH = {
    "levels": 2,
    "columns": {"slope_up": 1, "rough_slope_down": 1, "stairs_up": 1, "stairs_down": 1, "obstacles": 1},
    "patch_size": 4.0,
    "platform_size": 1.0,
    "border": 2.0,
}
"""Terrain of both simulations: mjlab gets our height field, since its own terrain is made of boxes."""


@dataclass(frozen=True)
class Case:
    """Task to compare.

    Attributes:
        task: Name in our package.
        root: Root body of the robot.
        settings: Our settings.
    """

    task: str
    root: str
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "go1": Case("Go1Velocity", "trunk"),
    "go1_rough": Case("Go1Velocity", "trunk", {"terrain": "rough", "rough": ROUGH}),
    "g1": Case("G1Velocity", "pelvis"),
}
FLOAT32 = "mjlab solves contacts in float32 on MuJoCo Warp; with mjlab's model in C MuJoCo they are equal"
STEP = "float32 against float64 over four physics steps"
BOUNCE = "mjlab measures contact times in physics steps, we in control steps: feet bounce in between"
FIELD = "MuJoCo Warp and C MuJoCo find different height field contacts"
HITS = "mjlab reads the first contact in the list; we use the strongest, or the sum"
PLANE = "both fit 32 points: mjlab's normal is an eigenvector, or vertical on steps; ours is a least-squares fit"
MISS = "ground above the trunk, or above a foot: mjlab's rays miss it, and the trunk's rays then read 5 m"
PAID = "mjlab's rewards use kinematics one physics step old, and foot heights one control step old"
REASONS = (
    ("go1_rough", "critic", "foot_contact_forces", 0.5, FIELD),
    ("*", "critic", "foot_contact_forces", 5e-3, FLOAT32),
    ("*", "reward", "soft_landing", 5e-3, FLOAT32),
    ("g1*", "*reward", "self_collisions", 4.0, HITS),
    ("go1_rough", "*reward", "*_collision*", 4.0, HITS),
    ("go1_rough", "end", "fallen", 1.0, HITS),
    ("go1_rough", "actor|critic|step critic", "height_scan", 1.1, MISS),
    ("go1_rough", "*critic", "foot_height", 0.06, MISS),
    ("go1_rough", "*reward", "foot_clearance", 0.2, MISS),
    ("go1_rough", "*reward", "upright", 0.1, PLANE),
    ("*", "step*", "foot_air_time", 0.5, BOUNCE),
    ("*", "step reward", "foot_swing_height", 1.5, BOUNCE),
    ("*", "step reward", "soft_landing", 1.0, BOUNCE),
    ("*", "step", "reward", 0.2, PAID),
    ("go1_rough", "step*", "*", 5.0, FIELD),
    ("*", "step*", "*", 5e-3, STEP),
)
"""Expected differences: patterns of case, kind and term; limit; reason. The first match applies."""


def agrees(row: dict[str, Any]) -> bool:
    """Return whether a term is within its limit, and its mean difference within a fifth of the limit."""
    return row["difference"] <= row["limit"] and row["mean"] <= 0.2 * row["limit"]


def reason_for(name: str, kind: str, term: str) -> tuple[float, str]:
    """Return the limit of a term's difference, and why the term may differ; "" if no difference is expected."""
    for case, kinds, terms, limit, reason in REASONS:
        if fnmatchcase(name, case) and fnmatchcase(term, terms) and any(fnmatchcase(kind, k) for k in kinds.split("|")):
            return limit, reason
    return TOLERANCE, ""


def make(case: Case, num_envs: int) -> Any:
    """Make our env without randomness, with mjlab's rewards."""
    import gpusim_rl
    from gpusim_rl.settings.compose import compose

    quiet = {"pushes": False, "encoder_bias": 0.0, "randomize_episode_start": False, "randomize": False}
    quiet["weights"] = compose([f"task={case.task}", "recipe=full"])["task"]["weights"]
    env = gpusim_rl.make_env(case.task, num_envs=num_envs, sim="mujoco", device="cpu", task={**quiet, **case.settings})
    env.reset()
    return env


def terrain(case: Case, envs: int) -> dict[str, Any] | None:
    """Return our height field, its contact parameters and mjlab's initial robot positions; None on flat ground."""
    import torch

    task = (env := make(case, 1)).task
    if task.ground is None:
        return None
    shape = env.sim.scene.model.geom("ground")
    surface: dict[str, Any] = {
        name: mjlab_models.plain(getattr(shape, name)) for name in ("friction", "solref", "solimp", "solmix")
    }
    surface["solmix"] = surface["solmix"][0]
    middle = task.ground.origins.flatten(0, 1).flip(0)[:envs]  # the hardest first
    x, y = (middle[:, :2] + torch.tensor([0.9, 0.1])).T  # off the platform
    beside = torch.cartesian_prod(*[torch.linspace(-0.4, 0.4, 9)] * 2).T
    around = task.ground.height(x[:, None] + beside[0], y[:, None] + beside[1])
    return {
        "heights": task.ground.heights.tolist(),
        "half_size": task.ground.half_size,
        "depth": float(env.sim.scene.model.hfield_size[0, 3]),
        "surface": surface,
        "places": torch.stack([x, y, around.amax(dim=1) + task.robot.height + 0.03], dim=1).tolist(),
    }


def record(name: str, python: str) -> None:
    """Record a case with mjlab, using the Python interpreter `python`."""
    from parity.mjlab_record import ENVS

    with tempfile.TemporaryDirectory() as folder:
        command = [python, str(Path(__file__).with_name("mjlab_record.py")), name, str(RECORDINGS / f"{name}.json")]
        if (ground := terrain(CASES[name], ENVS)) is not None:
            file = Path(folder, "terrain.json")
            file.write_text(json.dumps(ground))
            command.append(str(file))
        subprocess.run(command, check=True)


class Ours:
    """Our task, set to the states of a recording."""

    def __init__(self, case: Case, recording: dict[str, Any]) -> None:
        import torch

        self.state = {name: torch.tensor(value) for name, value in recording["state"].items()}
        self.env = make(case, len(self.state["qpos"]))
        self.task, self.sim = self.env.task, self.env.sim
        self.found = torch.tensor(recording["seen"]["critic"]["foot_contact"]) > 0.0

    def put(self) -> None:
        """Write the states and update all derived quantities, including contacts."""
        import torch

        task, state = self.task, self.state
        self.sim.reset(torch.ones(self.env.num_envs, dtype=torch.bool))
        self.write()
        task.encoder_bias.copy_(state["encoder_bias"])
        task.actions.copy_(state["action"])
        task.apply_action(task.actions)
        self.sim.step(1)  # contact forces refer to the state before a physics step
        self.write()
        self.sim.refresh()
        task.command.value.copy_(state["command"])
        task.last_actions.copy_(state["previous_action"])
        task.air_time.copy_(state["air_time"] * ~self.found)
        task.peak.copy_(state["peak"])
        # A foot lands if its contact time is at most one control step.
        task.touched.copy_(self.found & (state["contact_time"] > task.dt + 1e-6))

    def write(self) -> None:
        """Write positions and velocities."""
        import torch

        from gpusim_rl.env.math import quat_rotate

        qpos, qvel = self.state["qpos"], self.state["qvel"]
        self.task.body.set_state(
            torch.ones(self.env.num_envs, dtype=torch.bool),
            root_pos=qpos[:, :3],
            root_quat=qpos[:, 3:7],
            root_lin_vel=qvel[:, :3],
            root_ang_vel=quat_rotate(qpos[:, 3:7], qvel[:, 3:6]),
            joint_pos=qpos[:, 7:],
            joint_vel=qvel[:, 6:],
        )

    def rewards(self) -> dict[str, Any]:
        """Return the unweighted rewards per second."""
        weights, dt = self.task.cfg.all_weights, self.task.dt
        return {name: value / (weights[name] * dt) for name, value in self.task.rewards().items()}

    def look(self) -> dict[str, Any]:
        """Return all observations, rewards and terminations."""
        rewards = self.rewards()
        end = self.task.terminated().float()
        self.task.touched.copy_(self.task.touches)  # as `advance` does
        return {**self.observations(), "rewards": rewards, "end": end}

    def observations(self) -> dict[str, Any]:
        """Return the observation terms of both groups."""
        seen = self.task.observe()
        actor, critic = dict(seen["policy"]), dict(seen["critic"])
        critic["contact_force"] = -critic["contact_force"]  # mjlab's forces act on the ground
        return {"actor": actor, "critic": critic}

    def step(self, action: Any) -> dict[str, Any]:
        """Take one control step; return observations, state and rewards."""
        import torch

        task = self.task
        task.touched.copy_(self.found)
        task.last_actions.copy_(self.state["action"])
        self.env.put_action(action)
        task.apply_action(task.actions)
        self.sim.step(task.cfg.decimation)
        rewards = self.rewards()
        task.advance(torch.zeros(self.env.num_envs, dtype=torch.bool))
        task.command.value.copy_(self.state["command"])
        state = {"qpos": self.sim.qpos.clone(), "qvel": self.sim.qvel.clone()}
        return {**self.observations(), **state, "rewards": rewards}


def difference(ours: Any, theirs: Any) -> tuple[float, float, float]:
    """Return our largest magnitude, the largest difference (relative for magnitudes above 1), and the mean."""
    import torch

    theirs = torch.as_tensor(theirs).flatten(1) if torch.as_tensor(theirs).ndim > 1 else torch.as_tensor(theirs)
    ours = ours.reshape(theirs.shape)
    apart = (ours - theirs).abs() / theirs.abs().clamp(min=1.0)
    return ours.abs().max().item(), apart.max().item(), apart.mean().item()


def compare(name: str, recording: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per term: largest value, difference, limit and, for an expected difference, the reason."""
    import torch

    case, rows = CASES[name], []

    def row(kind: str, term: str, ours: Any, theirs: Any) -> None:
        limit, reason = reason_for(name, kind, term)
        largest, most, mean = (0.0, float("inf"), float("inf")) if ours is None else difference(ours, theirs)
        found = {"kind": kind, "term": term, "largest": largest, "difference": most, "mean": mean}
        rows.append({**found, "limit": limit, **({"reason": reason} if reason and most > TOLERANCE else {})})

    ours = Ours(case, recording)
    ours.put()
    seen, theirs = ours.look(), recording["seen"]
    for group in ("actor", "critic"):
        for term, value in theirs[group].items():
            value = theirs["actor"][term] if value == "actor" else value
            row(group, term, seen[group].get(OBSERVATIONS[term]), value)
    forces = torch.tensor(theirs["plain"]["foot_contact_forces"]).flatten(1)
    logs = forces.sign() * forces.abs().log1p()
    row("critic", "foot_contact_forces, in C MuJoCo", seen["critic"]["contact_force"], logs)
    for term, value in theirs["rewards"].items():
        row("reward", term, seen["rewards"].get(REWARDS[term]), value)
    [fallen] = [value for term, value in theirs["ends"].items() if term in ENDS]
    row("end", "fallen", seen["end"], fallen)
    dt, weights = ours.task.dt, ours.task.cfg.all_weights
    for term, weight in {**recording["weights"], "dt": recording["dt"]}.items():
        found = dt if term == "dt" else weights.get(REWARDS[term])
        row("weight", term, None if found is None else torch.tensor([found]), [weight])
    ours.put()
    after, theirs = ours.step(torch.tensor(recording["next"])), recording["then"]
    for part in ("qpos", "qvel"):
        row("step", part, after[part], theirs[part])
    for term, value in theirs["now"].items():
        row("step reward", term, after["rewards"].get(REWARDS[term]), value)
    shares = {term: weight * dt for term, weight in recording["weights"].items()}
    row(
        "step",
        "reward",
        *(
            sum(share * torch.as_tensor(terms[key(term)]) for term, share in shares.items())
            for terms, key in ((after["rewards"], REWARDS.get), (theirs["paid"], str))
        ),
    )
    for term, value in theirs["critic"].items():
        row("step critic", term, after["critic"].get(OBSERVATIONS[term]), value)
    return rows


def compare_models(name: str, recording: dict[str, Any]) -> list[str]:
    """Return one line per model value that differs, and per list of names that is ordered differently."""
    task = (env := make(CASES[name], 1)).task
    pose = dict(zip(task.body.joint_names, task.pose.tolist(), strict=True))
    ours = mjlab_models.describe(env.sim.scene.model, f"robot/{CASES[name].root}", pose, "ground")
    rows = mjlab_models.differences(ours, recording["model"])
    lines = [f"{what} {field}: {ours} here, {theirs} in mjlab" for what, field, ours, theirs in rows]
    for kind, names in (("joints", task.body.joint_names), ("actions", task.body.actuator_names)):
        if names != recording[kind]:
            lines.append(f"order of {kind}: {names} here, {recording[kind]} in mjlab")
    return lines


def read(name: str) -> dict[str, Any]:
    """Load a recording."""
    return json.loads((RECORDINGS / f"{name}.json").read_text())


def table(rows: list[dict[str, Any]]) -> str:
    """Format the rows as a table."""
    lines = []
    for row in rows:
        numbers = " ".join(f"{row[key]:>10.2g}" for key in ("largest", "difference"))
        lines.append(f"{row['kind']:<12} {row['term']:<33} {numbers}  {row.get('reason', '')}")
    return "\n".join([f"{'':<12} {'term':<33} {'largest':>10} {'difference':>10}", *lines])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", metavar="PYTHON", help="interpreter of an environment with mjlab")
    parser.add_argument("--only", choices=list(CASES), help="one case")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"), help="file to write")
    return parser.parse_args(argv)


def main() -> int:
    """Record, compare and write; return 1 if a term exceeds its limit or a model differs."""
    arguments = parse()
    result: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/parity/mjlab_parity.py", *sys.argv[1:]]),
        **provenance(arguments.out),
        "cases": {},
    }
    bad = []
    for name in [arguments.only] if arguments.only else CASES:
        if arguments.record:
            record(name, arguments.record)
        recording = read(name)
        rows, models = compare(name, recording), compare_models(name, recording)
        print(f"\n{recording['task']}, {len(recording['next'])} states\n{table(rows)}")
        bad += [f"{name} model: {line}" for line in models]
        bad += [
            f"{name} {row['kind']} {row['term']}: differs by {row['difference']:.2g} (limit {row['limit']:.2g})"
            for row in rows
            if not agrees(row)
        ]
        parts = {key: recording[key] for key in ("task", "versions")}
        result["cases"][name] = {**parts, "states": len(recording["next"]), "models": models, "terms": rows}
    if not arguments.only:
        write(arguments.out, json.dumps(result, indent=1) + "\n")
    print("\n".join(["", *bad]))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
