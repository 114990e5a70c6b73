"""What the start of a run tells of an off-policy algorithm."""

from __future__ import annotations

from gpusim_rl.learn.host_replay import HostReplay
from gpusim_rl.learn.replay import Replay
from gpusim_rl.settings.schema import DQNNetworkConfig, OffPolicyConfig


def describe_off_policy(
    cfg: OffPolicyConfig, replay: Replay | HostReplay, section: str, parameters: int, max_steps: int
) -> dict[str, str]:
    """Lines by label: networks, updates and memory.

    Args:
        cfg: Settings of the algorithm.
        replay: The replay memory.
        section: Section of the settings.
        parameters: Number of the parameters of actor and critics.
        max_steps: Control steps of a whole training.
    """
    envs, updates = replay.num_envs, cfg.horizon * cfg.updates
    samples = f"{envs} x {cfg.horizon} = {envs * cfg.horizon} samples"
    memory, start = _memory(cfg, replay, section), _start(cfg, replay, section, max_steps)
    return {
        "network": f"{_networks(cfg)}, {parameters:,} parameters",
        "batch": f"{updates} updates of {cfg.batch_size} for {samples}; replay of {memory}; {start}",
    }


def _networks(cfg: OffPolicyConfig) -> str:
    net = cfg.network

    def layers(sizes: list[int]) -> str:
        return net._target_ or f"{'x'.join(map(str, sizes))} {net.activation}"

    atoms = "" if net.atoms is None else f" of {net.atoms} atoms"
    critics = f"{net.critics} critic{'s' if net.critics > 1 else ''}{atoms} {layers(net.critic_hidden)}"
    return critics if isinstance(net, DQNNetworkConfig) else f"actor {layers(net.hidden)}, {critics}"


def _memory(cfg: OffPolicyConfig, replay: Replay | HostReplay, section: str) -> str:
    kept = f"saved in checkpoints ({section}.replay.save=false: smaller ones, a resumed run fills it again)"
    if not cfg.replay.save:
        kept = "not in checkpoints: a resumed run fills it again before it learns"
    where = " of the host" if isinstance(replay, HostReplay) else ""
    return f"{replay.num_steps} x {replay.num_envs}, {replay.num_bytes / 1e9:.3g} GB{where}, {kept}"


def _start(cfg: OffPolicyConfig, replay: Replay | HostReplay, section: str, max_steps: int) -> str:
    """When it begins to learn."""
    each = replay.num_envs * cfg.horizon
    first, last = -(-cfg.learning_starts // each), max_steps // cfg.horizon
    start = f"random actions until {cfg.learning_starts:,} transitions, in iteration {first}"
    if first + isinstance(replay, HostReplay) <= last:  # which an update reads before it has the newest
        return start
    advice = max(cfg.batch_size, each * last // 10)
    return f"{start} of {last}: nothing is learned. Try {section}.learning_starts={advice}"
