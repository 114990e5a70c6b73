"""Record observations and rewards of mjlab's velocity tasks in known states; run with an mjlab install's Python.

python benchmarks/parity/mjlab_record.py go1 recording.json [heights.json]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from parity.mjlab_models import describe

TASKS = {
    "go1": ("Mjlab-Velocity-Flat-Unitree-Go1", "robot/trunk"),
    "go1_rough": ("Mjlab-Velocity-Rough-Unitree-Go1", "robot/trunk"),
    "g1": ("Mjlab-Velocity-Flat-Unitree-G1", "robot/pelvis"),
}
ENVS, ROUNDS, STEPS = 6, 4, 12
"""Number of envs; number of recorded states; control steps before each."""
EAGERNESS = (0.0, 0.3, 1.0, 1.0, 2.0, 4.0)
"""Standard deviation of actions per env: the first robot stands, the last one falls."""
VERSIONS = ("mjlab", "mujoco", "mujoco-warp", "warp-lang", "torch")


def numbers(value: torch.Tensor, digits: int) -> Any:
    """Return a tensor as nested lists with `digits` significant digits; 0: all digits of float32."""
    if value.ndim:
        return [numbers(row, digits) for row in value]
    number = float(f"{value.item():.{digits}g}") if digits else float(str(value.numpy()))
    return int(number) if number == int(number) else number


def put_height_field(spec: mujoco.MjSpec, terrain: dict[str, Any]) -> None:
    """Replace mjlab's ground with our terrain's height field, at the same position."""
    heights = np.array(terrain["heights"], dtype=np.float32)
    low, relief = float(heights.min()), float(np.ptp(heights))
    body = spec.body("terrain")
    for geom in body.geoms:
        spec.delete(geom)
    spec.add_hfield(
        name="terrain",
        size=[*terrain["half_size"], relief, terrain["depth"]],
        ncol=heights.shape[0],
        nrow=heights.shape[1],
        userdata=((heights.T - low) / relief).ravel(),
    )
    field = mujoco.mjtGeom.mjGEOM_HFIELD
    body.add_geom(name="terrain", type=field, hfieldname="terrain", pos=[0.0, 0.0, low], **terrain["surface"])


def make(name: str, terrain: dict[str, Any] | None) -> Any:
    """Make the env without randomness or automatic resets."""
    import_module("mjlab.tasks")  # registers the tasks
    cfg = import_module("mjlab.tasks.registry").load_env_cfg(TASKS[name][0])
    cfg.scene.num_envs, cfg.seed, cfg.auto_reset = ENVS, 0, False
    if terrain is not None:
        cfg.scene.terrain.terrain_type, cfg.scene.terrain.terrain_generator = "plane", None
        cfg.scene.spec_fn = lambda spec: put_height_field(spec, terrain)
    for group in cfg.observations.values():
        group.enable_corruption, group.concatenate_terms = False, False
    cfg.events = {key: event for key, event in cfg.events.items() if event.mode == "reset"}
    cfg.curriculum = {}
    cfg.commands["twist"].resampling_time_range = (1e9, 1e9)
    return import_module("mjlab.envs").ManagerBasedRlEnv(cfg, device="cpu")


def command(env: Any, rng: np.random.Generator) -> torch.Tensor:
    """Sample a command for every env, to stand in one and run in another, and hold it; return the commands."""
    value = rng.uniform([-1.0, -1.0, -0.5], [1.0, 1.0, 0.5], (ENVS, 3)).round(2)
    value[rng.integers(ENVS)] = 0.0
    value[rng.integers(ENVS), 0] = 1.7
    term = env.command_manager.get_term("twist")
    for kind in (term.is_heading_env, term.is_standing_env, term.is_world_env, term.is_forward_env):
        kind[:] = False
    term.vel_command_b[:] = torch.tensor(value, dtype=torch.float32)
    return term.vel_command_b


def drive(env: Any, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Drive the robots with smooth noise; yield the next action of each round."""
    size = env.action_manager.total_action_dim
    action = np.zeros((ENVS, size))
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            action = 0.8 * action + 0.6 * np.array(EAGERNESS)[:, None] * rng.normal(size=action.shape)
            step(env, action)
        yield (action + 0.1 * rng.normal(size=action.shape)).round(3)


def step(env: Any, action: np.ndarray) -> None:
    """Take a control step; fallen robots stay down."""
    env._manual_reset_pending[:] = False
    env.step(torch.tensor(action, dtype=torch.float32))


def state_of(env: Any, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Return the rounded state that both simulations are set to."""
    data = env.sim.data
    qpos, qvel = data.qpos.numpy().round(4), data.qvel.numpy().round(3)
    qpos[:, 3:7] = data.qpos.numpy()[:, 3:7].round(7)
    feet = env.scene["feet_ground_contact"].data.current_air_time.shape
    chosen = {
        "qpos": qpos,
        "qvel": qvel,
        "command": command(env, rng).numpy(),
        "encoder_bias": rng.uniform(-0.015, 0.015, (ENVS, qvel.shape[1] - 6)).round(4),
        "action": env.action_manager.action.numpy().round(3),
        "previous_action": env.action_manager.prev_action.numpy().round(3),
        # Half of the feet in contact touched down within this control step.
        "contact_time": rng.choice([0.005, 0.02, 0.025, 0.3], feet),
        "air_time": rng.uniform(0.005, 0.4, feet).round(3),
        "peak": rng.uniform(0.0, 0.2, feet).round(3),
    }
    return {name: torch.tensor(np.asarray(value), dtype=torch.float32) for name, value in chosen.items()}


def put(env: Any, state: dict[str, torch.Tensor]) -> None:
    """Write a state and update all derived quantities, including contacts."""
    data, robot, manager = env.sim.data, env.scene["robot"], env.action_manager
    data.qpos[:], data.qvel[:] = state["qpos"], state["qvel"]
    data.qacc_warmstart[:] = 0.0
    robot.data.encoder_bias[:] = state["encoder_bias"]
    manager.process_action(state["action"])
    manager.apply_action()
    manager._action[:], manager._prev_action[:] = state["action"], state["previous_action"]
    env.scene.write_data_to_sim()
    env.sim.forward()
    env.sim.sense()
    for sensor in env.scene.sensors.values():
        sensor._invalidate_cache()
    feet = env.scene["feet_ground_contact"]
    found, times = feet._extract_sensor_data().found > 0, feet._air_time_state
    times.current_contact_time[:] = torch.where(found, state["contact_time"], 0.0)
    times.current_air_time[:] = torch.where(found, 0.0, state["air_time"])
    for sensor in env.scene.sensors.values():
        if getattr(sensor, "_history_state", None):  # force history of a control step: assume constant forces
            sensor._history_state["force"][:] = sensor._extract_sensor_data().force[:, :, None]
    env.reward_manager.get_term_cfg("foot_swing_height").func.peak_heights = state["peak"].clone()


def look(env: Any) -> dict[str, Any]:
    """Return observations, unweighted rewards, and terminations of the current state."""
    groups = env.observation_manager.compute(update_history=True)
    cfgs = {name: env.reward_manager.get_term_cfg(name) for name in env.reward_manager.active_terms}
    rewards = {name: cfg.func(env, **cfg.params) for name, cfg in cfgs.items() if cfg.weight}
    ends = {name: env.termination_manager.get_term_cfg(name) for name in env.termination_manager.active_terms}
    result: dict[str, Any] = {group: dict(terms) for group, terms in groups.items()}
    result["rewards"] = rewards
    result["ends"] = {name: cfg.func(env, **cfg.params).float() for name, cfg in ends.items() if name != "time_out"}
    return {kind: {name: value.clone() for name, value in terms.items()} for kind, terms in result.items()}


def plain_mujoco(env: Any, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return foot contact forces in C MuJoCo with mjlab's own model, to isolate the effect of float32."""
    model = env.sim.mj_model
    slots = [slot for slot in env.scene["feet_ground_contact"]._slots if slot.field_name == "force"]
    rows = []
    for i in range(ENVS):
        data = mujoco.MjData(model)
        data.qpos, data.qvel = state["qpos"][i].numpy(), state["qvel"][i].numpy()
        data.ctrl = env.sim.data.ctrl[i].numpy()
        mujoco.mj_forward(model, data)
        rows.append(np.stack([data.sensor(slot.sensor_name).data for slot in slots]))
    return torch.tensor(np.array(rows))


def after_step(env: Any, action: np.ndarray) -> dict[str, Any]:
    """Take one control step as in training; return the new state, observations and rewards.

    mjlab's rewards use kinematics one physics step old, and foot heights one control step old; `now` has the rewards of
    the new state.
    """
    manager = env.reward_manager
    swing = manager.get_term_cfg("foot_swing_height").func
    peaks = swing.peak_heights.clone()
    step(env, action)
    cfgs = {name: manager.get_term_cfg(name) for name in manager.active_terms}
    paid = {name: manager._step_reward[:, i] / cfg.weight for i, (name, cfg) in enumerate(cfgs.items()) if cfg.weight}
    paid = {name: value.clone() for name, value in paid.items()}
    swing.peak_heights = peaks
    now = {name: cfg.func(env, **cfg.params) for name, cfg in cfgs.items() if cfg.weight}
    data = env.sim.data
    critic = {name: value.clone() for name, value in env.obs_buf["critic"].items()}
    return {"qpos": data.qpos.clone(), "qvel": data.qvel.clone(), "paid": paid, "now": now, "critic": critic}


def record(name: str, terrain: dict[str, Any] | None) -> dict[str, Any]:
    """Return a recording: states, and mjlab's observations and rewards for each."""
    env = make(name, terrain)
    env.reset(seed=0)
    if terrain is not None:
        env.sim.data.qpos[:, :3] = torch.tensor(terrain["places"])
    robot, rng = env.scene["robot"], np.random.default_rng(0)
    pose = dict(zip(robot.joint_names, robot.data.default_joint_pos[0].tolist(), strict=True))
    cfgs = {term: env.reward_manager.get_term_cfg(term) for term in env.reward_manager.active_terms}
    rounds = []
    for action in drive(env, rng):
        state = state_of(env, rng)
        put(env, state)
        seen = look(env)
        seen["plain"] = {"foot_contact_forces": plain_mujoco(env, state)}
        put(env, state)
        following = torch.tensor(action, dtype=torch.float32)
        rounds.append({"state": state, "seen": seen, "next": following, "then": after_step(env, action)})
    merged = join(rounds)
    for term, value in merged["seen"]["critic"].items():
        if value == merged["seen"]["actor"].get(term):
            merged["seen"]["critic"][term] = "actor"
    return {
        "task": TASKS[name][0],
        "versions": {package: version(package) for package in VERSIONS},
        "dt": env.step_dt,
        "joints": list(robot.joint_names),
        "actions": env.action_manager.get_term("joint_pos").target_names,
        "feet": env.scene["feet_ground_contact"].primary_names,
        "weights": {term: cfg.weight for term, cfg in cfgs.items() if cfg.weight},
        "model": describe(env.sim.mj_model, TASKS[name][1], pose, "terrain"),
        **merged,
    }


def join(rounds: list[Any], digits: int = 6) -> Any:
    """Concatenate the envs of all rounds; states keep full precision, other values keep six digits."""
    if isinstance(rounds[0], dict):
        return {
            key: join([each[key] for each in rounds], 0 if key in ("state", "next") else digits) for key in rounds[0]
        }
    return numbers(torch.cat(rounds), digits)


def main() -> None:
    """Record one task."""
    name, out, *terrain = sys.argv[1:]
    found = record(name, json.loads(Path(terrain[0]).read_text()) if terrain else None)
    Path(out).write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
