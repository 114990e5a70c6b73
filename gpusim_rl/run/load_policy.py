"""Policy of another run, loaded as data (docs/security.md)."""

from __future__ import annotations

import dataclasses

import torch

from gpusim_rl.errors import ConfigError, warn
from gpusim_rl.files.checkpoint_file import load_with_digest
from gpusim_rl.files.paths import find_checkpoint
from gpusim_rl.learn.algorithm import TrainedPolicy, load_algorithm_class, make_policy
from gpusim_rl.run.checkpoint import check_training, must_fit
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.settings.checks import algorithm_settings_class, build
from gpusim_rl.settings.trust import check_saved_settings
from gpusim_rl.spaces import ActionSpace

NEEDED = ("config", "obs_sizes", "num_actions", "policy")


def load_policy(spec: RunSpec, action_space: ActionSpace, device: torch.device, name: str) -> TrainedPolicy:
    """Load the policy of another run (folder, .pt file, or task), with the settings in its checkpoint."""
    file = find_checkpoint(name, spec.cfg.log.dir).file
    state, digest = load_with_digest(file)
    check_training(state, file, NEEDED)
    config = check_saved_settings(state["config"], file, trust=spec.cfg.trust, config_dir=spec.config_dir)
    (theirs, ours) = (settings["task"].get("_target_") for settings in (config, spec.config))
    if theirs != ours:  # joints may be ordered differently
        warn(f"{file} is a policy for {theirs}, not {ours}: check that observations and actions have the same meaning")
    section, algorithm_class = config["algo"].get("name"), load_algorithm_class(config["algo"].get("_target_"))
    settings = build(algorithm_settings_class(section, algorithm_class), config.get(section), f"{file}: {section}")
    if state["num_actions"] != action_space.size:
        problem = f"has {state['num_actions']} actions, but the task has {action_space.size}"
        raise ConfigError(problem, key=str(file), hint="Try the policy's task")
    cfg = dataclasses.replace(spec.cfg, algo=section, algorithm=settings)
    with must_fit(file, "its own settings"):
        images = state.get("images", {})
        policy = make_policy(algorithm_class, cfg, state["obs_sizes"], action_space, device, images)
        policy.load_state_dict(state["policy"])
    return TrainedPolicy(policy.eval().requires_grad_(False), settings, state["obs_sizes"], digest)
