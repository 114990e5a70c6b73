"""skrl adapter, and PPO that bootstraps from the final observation."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from gpusim_rl import connect
from helpers.reference_env import NUM_ENVS, make


def test_adapter_implements_skrl_interface():
    from skrl.envs.wrappers.torch import Wrapper

    env = connect.SkrlEnv(make(critic=True))
    assert isinstance(env, Wrapper)
    assert (env.num_envs, env.num_agents, env.device.type) == (NUM_ENVS, 1, "cpu")
    assert env.observation_space.shape == (4,) and env.state_space is not None and env.state_space.shape == (8,)
    assert env.action_space.shape == (1,)
    obs, infos = env.reset()
    assert obs.shape == (NUM_ENVS, 4) and infos == {}
    obs, reward, terminated, truncated, _ = env.step(torch.zeros(NUM_ENVS, 1))
    state = env.state()
    assert obs.shape == (NUM_ENVS, 4) and state is not None and state.shape == (NUM_ENVS, 8)
    assert reward.shape == terminated.shape == truncated.shape == (NUM_ENVS, 1)
    assert terminated.dtype == truncated.dtype == torch.bool
    assert torch.equal(env.reset()[0], obs), "later resets return the current observation"
    assert connect.SkrlEnv(make()).state_space is None and connect.SkrlEnv(make()).state() is None


def test_diverged_env_ends_with_previous_observation():
    env = connect.SkrlEnv(make(speed_at=3))
    for _ in range(3):
        before = env.reset()[0]
        *_, infos = env.step(torch.zeros(NUM_ENVS, 1))
    assert torch.equal(infos["final_obs"]["policy"][1], before[1])


def agent_for(kind: Any, env: Any, tmp_path: Any) -> Any:
    from skrl.memories.torch import RandomMemory
    from skrl.utils.model_instantiators.torch import deterministic_model, gaussian_model

    spaces: dict[str, Any] = {
        "observation_space": env.observation_space,
        "state_space": env.state_space,
        "action_space": env.action_space,
        "device": "cpu",
    }
    critic_input = "OBSERVATIONS" if env.state_space is None else "STATES"

    def network(source: str) -> list[dict[str, Any]]:
        return [{"name": "net", "input": source, "layers": [16], "activations": "elu"}]

    models: dict[str, Any] = {
        "policy": gaussian_model(network=network("OBSERVATIONS"), output="ACTIONS", **spaces),
        "value": deterministic_model(network=network(critic_input), output="ONE", **spaces),
    }
    for role, model in models.items():
        model.init_state_dict(role=role)
    experiment = {"directory": str(tmp_path), "write_interval": 0, "checkpoint_interval": 0}
    cfg = {"rollouts": 16, "time_limit_bootstrap": True, "discount_factor": 0.9, "experiment": experiment}
    memory = RandomMemory(memory_size=16, num_envs=NUM_ENVS, device="cpu")
    agent = kind(models=models, memory=memory, cfg=cfg, **spaces)
    agent.init()
    agent.enable_training_mode(True)
    return agent


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("kind", ["PPO", "FinalObsPPO"])
def test_truncated_episode_bootstraps_final_observation(kind, critic, tmp_path):
    # only the time limit ends episodes
    env = connect.SkrlEnv(make(critic=critic, max_force=1e-3, reset_distance=100.0))
    agent = agent_for(getattr(importlib.import_module("gpusim_rl.connect.skrl"), kind), env, tmp_path)
    truncations, equal = 0, True
    obs, states = env.reset()[0], env.state()
    for step in range(16):
        with torch.no_grad():
            actions, _ = agent.act(obs, states, timestep=step, timesteps=16)
            next_obs, reward, terminated, truncated, infos = env.step(actions)
            final = infos["final_obs"]
            value, _ = agent.value.act({"observations": final["policy"], "states": final.get("critic")}, role="value")
            expected = reward + 0.9 * value * truncated
            before = {"observations": obs, "states": states, "actions": actions, "rewards": reward.clone()}
            after = {"next_observations": next_obs, "next_states": env.state(), "infos": infos}
            ends = {"terminated": terminated, "truncated": truncated}
            agent.record_transition(**before, **after, **ends, timestep=step, timesteps=16)
        equal &= torch.equal(agent.memory.get_tensor_by_name("rewards")[step], expected)
        truncations += int(truncated.sum())
        obs, states = next_obs, env.state()
    assert truncations > 0
    assert equal == (kind == "FinalObsPPO"), "plain skrl uses the next episode's first observation"
