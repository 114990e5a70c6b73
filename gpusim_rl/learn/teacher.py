"""Policies of other runs: teachers to imitate, and warm starts."""

from __future__ import annotations

import shlex
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

GROUP = "teacher"
"""Group that a teacher observes, if the envs have it; else `policy`."""
NETWORK = ("_target_", "hidden", "activation", "state_dependent_std", "rnn", "rnn_size", "rnn_layers")
"""Network settings that determine the actor."""
LABEL = "label"
"""Input with the teacher's actions."""
IMITATION = "loss/imitation"
"""Loss between the mean actions of student and teacher."""


def _load(env: EnvSpec, context: LearnerContext, key: str, name: str, group: str) -> TrainedPolicy:
    assert context.load_policy is not None, "no policies of other runs can be loaded here"
    found = context.load_policy(name)
    theirs, ours = found.obs_sizes["policy"], env.obs_sizes.get(group)
    if ours is None:
        raise ConfigError(f"{key}={name}: it observes numbers, and these envs have images alone. Try a group {group!r}")
    if theirs != ours:
        problem = f"it observes {theirs} numbers, and the group {group!r} of this task has {ours}"
        advice = "task.observations as in its config.yaml; a part that only a teacher gets has used=false"
        raise ConfigError(f"{key}={name}: {problem}. Try its task, with {advice}")
    return found


class Labels:
    """Most likely actions of a teacher in the student's envs, clamped to the action limit.

    Attributes:
        group: Observed group.
        actions: Actions in the rollout, [T, N, actions].
        hidden: Recurrent state of the teacher.

    Raises:
        ConfigError: There is no such run, it is not trusted, or it does not fit the envs.
    """

    def __init__(
        self, env: EnvSpec, context: LearnerContext, setting: str, name: str | None, horizon: int, device: torch.device
    ) -> None:
        key = f"{context.section}.{setting}"
        if name is None:
            problem = "is not given, and a resume needs it again: expected the run of a teacher"
            raise ConfigError(f"{key} {problem}. Try {key}=<run folder or .pt file>")
        if not isinstance(env.action_space, Box):
            raise ConfigError(f"{key}={name}: the task's actions are choices, and only continuous ones can be imitated")
        of_images = "policy" if env.obs_sizes["policy"] else "critic"  # the policy observes nothing else
        self.group = GROUP if GROUP in env.obs_sizes else of_images
        found = _load(env, context, key, name, self.group)
        self._policy, self._digest = found.policy, found.digest
        self._limit = env.action_space.limit
        self.actions = torch.zeros(horizon, env.num_envs, env.action_space.size, device=device)
        self.hidden: Hidden = found.policy.actor_state(env.num_envs)

    @torch.no_grad()
    def record(self, t: int, obs: Observation, done: Tensor) -> None:
        """Store the teacher's actions for step t; reset its state where episodes are done."""
        action, hidden = self._policy.act_without_critic({"policy": obs[self.group]}, self.hidden)
        self.actions[t].copy_(action if self._limit is None else action.clamp(-self._limit, self._limit))
        for state, new in zip(self.hidden, hidden, strict=True):
            state.copy_(new.masked_fill(done[None, :, None], 0.0))

    def begin_episodes(self) -> None:
        """Reset the recurrent state."""
        for state in self.hidden:
            state.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return digest and recurrent state of the teacher."""
        return {"digest": self._digest, "hidden": [state.clone() for state in self.hidden]}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore `state_dict`; a different teacher, or None, begins new episodes."""
        if state is None or state["digest"] != self._digest:
            if state is not None:
                warn("the teacher is not the one that the training had before")
            self.begin_episodes()
            return
        for hidden, saved in zip(self.hidden, state["hidden"], strict=True):
            hidden.copy_(saved)


class Teacher(Extension):
    """Loss that pulls the student's mean actions towards a teacher's."""

    groups = (GROUP,)

    def __init__(self, cfg: PPOConfig, env: EnvSpec, context: LearnerContext, device: torch.device) -> None:
        settings = cfg.teacher
        self._cfg = settings
        self.labels = Labels(env, context, "teacher.run", settings.run, cfg.horizon, device)
        self._steps = torch.zeros((), device=device)  # control steps of each env
        self._weight = torch.tensor(settings.weight, dtype=torch.float32, device=device)
        self.weights = {IMITATION: self._weight if settings.end else settings.weight}

    def record(self, t: int, obs: Observation, step: Transition) -> None:
        """Store the teacher's actions."""
        self.labels.record(t, obs, step.done)

    def begin_update(self, rollout: Rollout, reward: Tensor, inputs: dict[str, Tensor], policy: ActorCritic) -> Tensor:
        """Add the teacher's actions to the inputs and set the scheduled weight."""
        inputs[LABEL], cfg = self.labels.actions, self._cfg
        if cfg.end:
            left = ((cfg.end - self._steps) / max(1, cfg.end - cfg.begin)).clamp(0.0, 1.0)
            self._weight.copy_(cfg.weight * left)
        self._steps += rollout.horizon
        return reward

    def losses(self, evaluate: Evaluate, minibatch: Minibatch) -> Evaluated:
        """Add the squared distance between mean actions."""
        terms, now = evaluate(minibatch)
        distance = squared_distance(now.distribution.mode, minibatch.inputs[LABEL])
        return {**terms, IMITATION: distance.mean(dim=-1)}, now

    def describe(self) -> dict[str, str]:
        """Return teacher and weight."""
        cfg = self._cfg
        course = f", 0 from step {cfg.end} on" if cfg.end else ""
        return {"teacher": f"{cfg.run}, observes {self.labels.group}, weight {cfg.weight:g}{course}"}

    def state_dict(self) -> dict[str, Any]:
        """Return schedule progress, and the teacher's unfinished episodes."""
        return {"steps": self._steps.clone(), "episodes": self.labels.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self._steps.copy_(state["steps"])
        self.labels.load_state_dict(state["episodes"])


TAKEN = "actor.", "head.", "encoder.", "obs_norm.policy."
"""Prefixes of a policy's acting parameters."""


def begin_from(policy: Policy, settings: Any, env: EnvSpec, context: LearnerContext, name: str) -> None:
    """Copy actor and observation statistics of the run, checkpoint or task `name`; the critic stays new.

    Raises:
        ConfigError: There is no such run, it is not trusted, or its policy does not match.
    """
    found = _load(env, context, "start_from", name, "policy")
    if not (isinstance(policy, ActorCritic) and isinstance(found.policy, ActorCritic)):
        raise ConfigError(f"start_from={name}: both runs must be of ppo, amp, a2c, reinforce, impala, distill or bc")
    theirs = found.settings
    names = NETWORK if theirs.network.rnn is not None else NETWORK[:-2]
    wanted = {f"network.{key}": (getattr(theirs.network, key), getattr(settings.network, key)) for key in names}
    if env.images:
        encoders = theirs.network.encoder, settings.network.encoder
        names = "_target_", "kind", "frames"
        wanted |= {f"network.encoder.{key}": tuple(getattr(encoder, key) for encoder in encoders) for key in names}
    wanted["normalize_obs"] = theirs.normalize_obs, settings.normalize_obs
    advice = [f"{context.section}.{key}={text_of(value)}" for key, (value, now) in wanted.items() if value != now]
    if advice:
        raise ConfigError(f"start_from={name}: its policy is another one. Try {shlex.join(advice)}")
    own, saved = policy.state_dict(), found.policy.state_dict()
    taken = {key: saved[key] for key in own if key.startswith(TAKEN)}
    policy.load_state_dict({**own, **taken})
