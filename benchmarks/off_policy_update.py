"""Measures a whole update of SAC and TD3 beside SB3's and plain eager code; writes off_policy_update.json.

    python benchmarks/off_policy_update.py

An update draws a batch from a full memory of 200,000 transitions, and changes critics, actor, temperature and targets.
Sizes are Ant's. The networks are the same: two layers of 256 for the actor and for each of two critics, without layer
normalisation. Batches are of 256. SAC changes its actor in every update, TD3 in every second one, as SB3 does. The
plain code is written as CleanRL writes it: from the formulas, one operator after the other. Medians of interleaved
rounds.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OBS, ACTIONS, ENVS, STEPS, EPISODE = 60, 8, 8, 25_000, 1000
BATCH, UPDATES, ROUNDS, GAMMA, TAU, LEARNING_RATE = 256, 64, 9, 0.99, 0.005, 3e-4
DELAY = {"sac": 1, "td3": 2}
HIDDEN = (256, 256)

Update = Callable[[], object]


def ours(algo: str, precision: str) -> Update:
    """`UPDATES` updates of this package."""
    import torch

    from gpusim_rl.learn.algorithm import EnvSpec, load_algorithm_class
    from gpusim_rl.settings.checks import build
    from gpusim_rl.settings.compose import compose
    from gpusim_rl.spaces import Box

    cls: Any = load_algorithm_class(f"gpusim_rl.learn.{algo}.{algo.upper()}")
    overrides = [
        f"algo={algo}",
        f"{algo}.horizon=1",
        f"{algo}.updates={UPDATES}",
        f"{algo}.batch_size={BATCH}",
        f"{algo}.policy_delay={DELAY[algo]}",
        f"{algo}.learning_starts={BATCH}",
        f"{algo}.learning_rate={LEARNING_RATE}",
        f"{algo}.tau={TAU}",
        f"{algo}.precision={precision}",
        f"{algo}.normalize_obs=false",
        f"{algo}.network.layer_norm=false",
        f"{algo}.replay.capacity={STEPS * ENVS}",
    ]
    cfg = build(cls.Config, compose(overrides)[algo], algo)
    torch.manual_seed(0)
    spec = EnvSpec(ENVS, {"policy": OBS}, Box(ACTIONS), EPISODE)
    algorithm = cls(cfg, spec, device=torch.device("cpu"), seed=0, max_iterations=1)
    replay = algorithm.replay
    for memory in (*replay.obs.values(), replay.action, replay.reward):
        memory.normal_()
    replay.action.clamp_(-1.0, 1.0)
    replay.total.fill_(STEPS)
    return algorithm.update


def sb3(algo: str) -> Update:
    """The same of stable_baselines3."""
    import gymnasium as gym
    import numpy as np
    import torch
    from stable_baselines3 import SAC, TD3
    from stable_baselines3.common.logger import Logger

    class Spaces(gym.Env):
        observation_space = gym.spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
        action_space = gym.spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)

    cls = {"sac": SAC, "td3": TD3}[algo]
    model = cls(
        "MlpPolicy",
        Spaces(),
        learning_rate=LEARNING_RATE,
        batch_size=BATCH,
        buffer_size=STEPS * ENVS,
        tau=TAU,
        gamma=GAMMA,
        policy_kwargs={"net_arch": list(HIDDEN)},
        device="cpu",
        seed=0,
    )
    model.set_logger(Logger(None, []))
    random = np.random.default_rng(0)
    buffer = model.replay_buffer
    assert buffer is not None
    for array in (buffer.observations, buffer.next_observations, buffer.actions, buffer.rewards):
        array[:] = random.standard_normal(array.shape, dtype=np.float32)
    buffer.actions.clip(-1.0, 1.0, out=buffer.actions)
    buffer.full = True
    torch.manual_seed(0)
    return lambda: model.train(gradient_steps=UPDATES, batch_size=BATCH)


def plain(algo: str) -> Update:
    """The same, one operator after the other, with torch's own Adam and tensors in memory."""
    import torch
    from torch import nn
    from torch.nn import functional

    torch.manual_seed(0)
    size = STEPS * ENVS
    memory = [torch.randn(size, n) for n in (OBS, OBS, ACTIONS, 1, 1)]
    memory[2].clamp_(-1.0, 1.0)
    memory[4].zero_()

    def network(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(inputs, HIDDEN[0]), nn.ReLU(), nn.Linear(*HIDDEN), nn.ReLU(), nn.Linear(HIDDEN[1], outputs)
        )

    actor = network(OBS, 2 * ACTIONS if algo == "sac" else ACTIONS)
    critics = [network(OBS + ACTIONS, 1) for _ in range(2)]
    targets, target_actor = copy.deepcopy(critics), copy.deepcopy(actor)
    log_alpha = torch.zeros(1, requires_grad=True)
    critic_adam = torch.optim.Adam([p for q in critics for p in q.parameters()], lr=LEARNING_RATE)
    actor_adam = torch.optim.Adam(actor.parameters(), lr=LEARNING_RATE)
    alpha_adam = torch.optim.Adam([log_alpha], lr=LEARNING_RATE)

    def sample(obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = actor(obs).chunk(2, dim=-1)
        log_std = -5.0 + 0.5 * 7.0 * (torch.tanh(log_std) + 1.0)
        normal = torch.distributions.Normal(mean, log_std.exp())
        drawn = normal.rsample()
        action = torch.tanh(drawn)
        log_prob = normal.log_prob(drawn) - torch.log(1.0 - action.pow(2) + 1e-6)
        return action, log_prob.sum(dim=1, keepdim=True)

    def q(networks: list[nn.Module], obs: torch.Tensor, action: torch.Tensor) -> list[torch.Tensor]:
        return [network(torch.cat([obs, action], dim=1)) for network in networks]

    def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def follow(behind: nn.Module, ahead: nn.Module) -> None:
        for target, parameter in zip(behind.parameters(), ahead.parameters(), strict=True):
            target.data.copy_(TAU * parameter.data + (1.0 - TAU) * target.data)

    def update(number: int) -> None:
        obs, next_obs, action, reward, done = (x[torch.randint(0, size, (BATCH,))] for x in memory)
        with torch.no_grad():
            if algo == "sac":
                next_action, log_prob = sample(next_obs)
                value = torch.min(*q(targets, next_obs, next_action)) - log_alpha.exp() * log_prob
            else:
                noise = (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)
                next_action = (torch.tanh(target_actor(next_obs)) + noise).clamp(-1.0, 1.0)
                value = torch.min(*q(targets, next_obs, next_action))
            target = reward + (1.0 - done) * GAMMA * value
        step(critic_adam, torch.stack([functional.mse_loss(x, target) for x in q(critics, obs, action)]).sum())
        if number % DELAY[algo] == 0:
            if algo == "sac":
                chosen, log_prob = sample(obs)
                step(actor_adam, (log_alpha.exp().detach() * log_prob - torch.min(*q(critics, obs, chosen))).mean())
                step(alpha_adam, (-log_alpha.exp() * (log_prob.detach() - ACTIONS)).mean())
            else:
                step(actor_adam, -critics[0](torch.cat([obs, torch.tanh(actor(obs))], dim=1)).mean())
                follow(target_actor, actor)
        for behind, ahead in zip(targets, critics, strict=True):
            follow(behind, ahead)

    def updates() -> None:
        for number in range(UPDATES):
            update(number)

    return updates


def measure(algo: str) -> dict[str, Any]:
    """Milliseconds of an update by number of threads, of each implementation."""
    import torch

    from gpusim_rl.machine.hardware import available_cpus

    made = {
        "gpusim_rl, fp32": ours(algo, "fp32"),
        "gpusim_rl, bf16": ours(algo, "bf16"),
        "stable_baselines3": sb3(algo),
        "plain eager code": plain(algo),
    }
    found: dict[str, dict[str, Any]] = {name: {} for name in made}
    for threads in sorted({1, available_cpus()}):
        torch.set_num_threads(threads)
        times: dict[str, list[float]] = {name: [] for name in made}
        for number in range(ROUNDS + 2):
            for name, update in made.items():
                started = time.perf_counter()
                update()
                if number > 1:
                    times[name].append(1e3 * (time.perf_counter() - started) / UPDATES)
        for name, values in times.items():
            found[name][f"ms_with_{threads}_threads"] = round(statistics.median(values), 3)
    return found


def main() -> None:
    """Measures and writes."""
    from gpusim_rl.machine.hardware import limit_openmp_spin, tune_malloc

    limit_openmp_spin()
    tune_malloc()
    from gpusim_rl.files.provenance import describe_environment, git_state

    found = {algo: measure(algo) for algo in DELAY}
    result = {
        "command": "python benchmarks/off_policy_update.py",
        "git": git_state(Path("runs"))[0],
        "environment": describe_environment(),
        "batch": BATCH,
        "updates_in_a_call": UPDATES,
        "by_algorithm": found,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    for algo, by_name in found.items():
        for name, numbers in by_name.items():
            print(f"{algo}, {name}: {numbers}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
