"""Policies of other runs: teachers to imitate, and warm starts."""

from __future__ import annotations

import shlex
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gpusim_rl.errors import ConfigError, warn
from gpusim_rl.learn.algorithm import EnvSpec, Hidden, LearnerContext, Observation, Policy, TrainedPolicy, Transition
from gpusim_rl.learn.distributions import squared_distance
from gpusim_rl.learn.extensions import Evaluate, Evaluated, Extension
from gpusim_rl.learn.minibatch import Minibatch
from gpusim_rl.learn.networks import ActorCritic
from gpusim_rl.learn.rollout import Rollout
from gpusim_rl.settings.overrides import text_of
from gpusim_rl.settings.schema import PPOConfig
from gpusim_rl.spaces import Box

GROUP = "teacher"  # group that a teacher observes, if the envs have it; else `policy`
NETWORK = ("_target_", "hidden", "activation", "state_dependent_std", "rnn", "rnn_size", "rnn_layers")
"""Network settings that determine the actor."""
LABEL = "label"  # input with the teacher's actions
IMITATION = "loss/imitation"  # loss between the mean actions of student and teacher


def _load(env: EnvSpec, context: LearnerContext, key: str, name: str, group: str) -> TrainedPolicy:
    assert context.load_policy is not None, "no policies of other runs can be loaded here"
    trained = context.load_policy(name)
    theirs, ours = trained.obs_sizes["policy"], env.obs_sizes.get(group)
    if ours is None:
        problem, hint = "needs numeric observations, but these envs have only images", f"Try adding group {group!r}"
        raise ConfigError(problem, key=f"{key}={name}", hint=hint)
    if theirs != ours:
        problem = f"the loaded policy observes {theirs} numbers, but group {group!r} of this task has {ours}"
        only = ", with used=false for terms that only the teacher observes" if group == GROUP else ""
        hint = f"Copy `task`, with its observations, from the config.yaml of the loaded run{only}"
        raise ConfigError(problem, key=f"{key}={name}", hint=hint)
    return trained


class Labels:
    """Most likely actions of a teacher in the student's envs, clamped to the action limit, [T, N, actions].

    Raises:
        ConfigError: The run does not exist, is not trusted, or does not match the envs.
    """

    def __init__(
        self, env: EnvSpec, context: LearnerContext, setting: str, name: str | None, horizon: int, device: torch.device
    ) -> None:
        key = f"{context.section}.{setting}"
        if name is None:
            hint = f"Try {key}=<run folder or .pt file>"
            raise ConfigError("no teacher given (also required on resume)", key=key, hint=hint)
        if not isinstance(env.action_space, Box):
            problem = "discrete actions are not supported: only continuous actions can be imitated"
            raise ConfigError(problem, key=f"{key}={name}")
        student_group = "policy" if env.obs_sizes["policy"] else "critic"  # `policy` may be images alone
        self.group = GROUP if GROUP in env.obs_sizes else student_group
        trained = _load(env, context, key, name, self.group)
        self._policy, self._digest = trained.policy, trained.digest
        self._limit = env.action_space.limit
        self.actions = torch.zeros(horizon, env.num_envs, env.action_space.size, device=device)
        self.hidden: Hidden = trained.policy.actor_state(env.num_envs)

    @torch.no_grad()
    def record(self, t: int, obs: Observation, done: Tensor) -> None:
        """Store the teacher's actions for step t; reset its state where episodes are done."""
        action, hidden = self._policy.act_without_critic({"policy": obs[self.group]}, self.hidden)
        self.actions[t].copy_(action if self._limit is None else action.clamp(-self._limit, self._limit))
        for state, new in zip(self.hidden, hidden, strict=True):
            state.copy_(new.masked_fill(done[None, :, None], 0.0))

    def state_dict(self) -> dict[str, Any]:
        """Return digest and recurrent state of the teacher."""
        return {"digest": self._digest, "hidden": [state.clone() for state in self.hidden]}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore `state_dict`; reset the recurrent state if `state` is None or from a different teacher."""
        if state is not None and state["digest"] != self._digest:
            warn("the teacher differs from the one used before the resume")
            state = None
        for i, hidden in enumerate(self.hidden):
            hidden.copy_(torch.zeros_like(hidden) if state is None else state["hidden"][i])


class Teacher(Extension):
    """Loss that pulls the student's mean actions towards a teacher's."""

    groups = (GROUP,)

    def __init__(self, cfg: PPOConfig, env: EnvSpec, context: LearnerContext, device: torch.device) -> None:
        self._cfg, weight = cfg.teacher, cfg.teacher.weight
        self.labels = Labels(env, context, "teacher.run", cfg.teacher.run, cfg.horizon, device)
        self._steps = torch.zeros((), device=device)  # control steps per env
        self._weight = torch.tensor(weight, dtype=torch.float32, device=device)
        self.weights = {IMITATION: self._weight if cfg.teacher.end else weight}

    def record(self, t: int, obs: Observation, step: Transition) -> None:
        """Store the teacher's actions."""
        self.labels.record(t, obs, step.done)

    def begin_update(self, rollout: Rollout, reward: Tensor, inputs: dict[str, Tensor], policy: ActorCritic) -> Tensor:
        """Add the teacher's actions to the inputs and set the scheduled weight."""
        inputs[LABEL], cfg = self.labels.actions, self._cfg
        if cfg.end:
            share = ((cfg.end - self._steps) / max(1, cfg.end - cfg.begin)).clamp(0.0, 1.0)
            self._weight.copy_(cfg.weight * share)
        self._steps += rollout.horizon
        return reward

    def losses(self, evaluate: Evaluate, minibatch: Minibatch) -> Evaluated:
        """Add the squared distance between the mean actions of student and teacher."""
        terms, now = evaluate(minibatch)
        distance = squared_distance(now.distribution.mode, minibatch.inputs[LABEL])
        return {**terms, IMITATION: distance.mean(dim=-1)}, now

    def describe(self) -> dict[str, str]:
        """Return the banner line: teacher and weight."""
        cfg = self._cfg
        schedule = f", 0 from step {cfg.end} on" if cfg.end else ""
        return {"teacher": f"{cfg.run}, observes {self.labels.group}, weight {cfg.weight:g}{schedule}"}

    def state_dict(self) -> dict[str, Any]:
        """Return schedule progress, and the teacher's state in unfinished episodes."""
        return {"steps": self._steps.clone(), "episodes": self.labels.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self._steps.copy_(state["steps"])
        self.labels.load_state_dict(state["episodes"])


ACTING = "actor.", "head.", "encoder.", "obs_norm.policy."  # prefixes of the parameters that determine actions


def begin_from(policy: Policy, settings: Any, env: EnvSpec, context: LearnerContext, name: str) -> None:
    """Copy the actor's weights and observation statistics from a run, checkpoint or task, or raise ConfigError."""
    trained = _load(env, context, "start_from", name, "policy")
    if not (isinstance(policy, ActorCritic) and isinstance(trained.policy, ActorCritic)):
        problem = "both runs must use ppo, amp, a2c, reinforce, impala, distill or bc"
        raise ConfigError(problem, key=f"start_from={name}")
    theirs, rnn = trained.settings, trained.settings.network.rnn is not None
    paths = [f"network.{key}" for key in (NETWORK if rnn else NETWORK[:-2])]
    paths += [f"network.encoder.{key}" for key in ("_target_", "kind", "frames")] if env.images else []
    values = [(path, *(attrgetter(path)(run) for run in (theirs, settings))) for path in (*paths, "normalize_obs")]
    fixes = [f"{context.section}.{path}={text_of(value)}" for path, value, current in values if value != current]
    if fixes:
        raise ConfigError("the policy structures differ", key=f"start_from={name}", hint=f"Try {shlex.join(fixes)}")
    own, saved = policy.state_dict(), trained.policy.state_dict()
    policy.load_state_dict({key: saved[key] if key.startswith(ACTING) else own[key] for key in own})
