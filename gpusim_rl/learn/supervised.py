"""Supervised learning: behaviour cloning and policy distillation."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gpusim_rl.errors import ConfigError, warn
from gpusim_rl.learn import demonstrations
from gpusim_rl.learn.algorithm import DEFAULT_CONTEXT, EnvSpec, LearnerContext, Transition
from gpusim_rl.learn.distributions import DiagonalGaussian
from gpusim_rl.learn.exploration import fitted
from gpusim_rl.learn.gradient_steps import Chunks, chunk_samples
from gpusim_rl.learn.minibatch import Sequences, fit_sequence_length, shuffle
from gpusim_rl.learn.networks import ActorCritic
from gpusim_rl.learn.on_policy import OnPolicy
from gpusim_rl.learn.teacher import IMITATION, LABEL, Labels
from gpusim_rl.settings.schema import BCConfig, DistillConfig

MOST_HELD_OUT = 8192  # maximum held-out control steps in the validation loss; beyond it, an evenly spaced subset
DISTANCES = {"mse": functional.mse_loss, "huber": functional.huber_loss}


def _seen(env: EnvSpec) -> EnvSpec:
    return dataclasses.replace(env, obs_sizes={"policy": env.obs_sizes["policy"]})


def _make_student(cls: type, cfg: Any, env: EnvSpec, context: LearnerContext, device: torch.device) -> ActorCritic:
    """Build networks with a frozen value head, and a frozen log-std unless the loss depends on it."""
    policy = ActorCritic(cfg, _seen(env), context.section).to(device)
    fixed = ("value_head",) if cfg.loss == "nll" else ("value_head", "head.log_std")
    for name, parameter in policy.named_parameters():
        if name.startswith(fixed):
            parameter.requires_grad_(False)
    return policy


class BC(OnPolicy):
    """Behaviour cloning of demonstrations (Pomerleau 1988; Bain and Sammut 1995).

    The rollout only evaluates the policy. Demonstrations set the observation statistics; evenly spaced whole episodes
    are held out. `seen` and `held_out` hold raw observations and actions, [1, steps, size] each.
    """

    Config = BCConfig

    cfg: BCConfig

    def __init__(self, cfg: BCConfig, env: EnvSpec, context: LearnerContext = DEFAULT_CONTEXT, **rest: Any) -> None:
        if env.images:
            problem = "image observations are not supported: demonstrations contain no images"
            raise ConfigError(problem, key="algo=bc", hint="Try algo=distill")
        super().__init__(cfg, _seen(env), context, **rest)
        self.seen, self.held_out, self._digest = self._load(env)
        self.steps.chunks = Chunks(self.device, chunk_samples(cfg.batch_size), compiled=context.compile)

    make_policy = classmethod(_make_student)  # type: ignore[reportAssignmentType]

    def loss_weights(self) -> dict[str, float]:
        return {IMITATION: 1.0}

    def fit_minibatches(self, samples: int) -> int:
        return self.cfg.gradient_steps

    def _load(self, env: EnvSpec) -> tuple[Sequences, Sequences | None, str]:
        """Split the demonstrations and set the observation statistics; return training part, held-out part, digest."""
        key, file = f"{self._section}.demonstrations.file", self.cfg.demonstrations.file
        if file is None:
            hint = f"Try {key}=<file.npz>, with a file recorded by gpusim-rl collect"
            raise ConfigError("no demonstrations given (also required on resume)", key=key, hint=hint)
        try:
            shown, digest = demonstrations.load(file, env, ["policy"])
        except ConfigError as error:
            raise error.within(key) from None
        episode = np.cumsum(shown.ends) - shown.ends  # episode index of each control step
        whole = np.floor(np.arange(shown.episodes + 1) * self.cfg.demonstrations.held_out)
        held = (np.diff(whole) > 0)[episode]
        steps, held_steps = (np.flatnonzero(where & ~shown.diverged) for where in (~held, held))
        if not len(steps):
            problem = "nothing to train on: every control step outside the held-out episodes diverged"
            raise ConfigError(problem, key=f"{key}={file}", hint="Try more episodes")
        held_steps = held_steps[:: -(-len(held_steps) // MOST_HELD_OUT) or 1]
        seen = self._part(shown, steps)
        for norm in self.policy.obs_norm.values():
            norm.update(seen.inputs["policy"][0])  # type: ignore[operator]
        return seen, self._part(shown, held_steps) if len(held_steps) else None, digest

    def _part(self, shown: demonstrations.Demonstrations, steps: np.ndarray) -> Sequences:
        arrays = shown.obs["policy"], shown.action
        obs, action = (demonstrations.tensor(array[steps], self.device)[None] for array in arrays)
        return Sequences({"policy": obs}, action, (), None)

    def update(self) -> dict[str, Tensor]:
        self.steps.anneal(self.max_iterations)
        rollout = self.rollout
        stats = {"check/obs": rollout.obs["policy"].sum(), "check/reward": rollout.reward.sum()}
        if self.held_out is not None:
            with torch.no_grad():
                stats["loss/held_out"] = self.errors(self.held_out.inputs, self.held_out.packed).mean()
        shape = (self.num_minibatches, self.cfg.batch_size)
        drawn = torch.randint(self.seen.packed.shape[1], shape, generator=self._shuffle_generator, device=self.device)
        steps = [self.step(self.seen, index) for index in drawn.unbind()]
        return stats | self.end_update(steps, observed=False)

    def chunk_loss(self, inputs: dict[str, Tensor], packed: Tensor, hidden: Any, is_first: Tensor | None) -> Tensor:
        samples = self.cfg.batch_size * self.collective.size
        return self.errors(inputs, packed).sum()[None] / samples

    def errors(self, obs: dict[str, Tensor], action: Tensor) -> Tensor:
        """Return the loss of each sample, for raw observations."""
        distribution = self.policy(self.policy.normalize(obs))[0]
        if self.cfg.loss == "mse" and isinstance(distribution, DiagonalGaussian):
            return (distribution.mean - action).square().mean(dim=-1)
        return -distribution.log_prob(action)

    def _describe_steps(self) -> str:
        return f"{self.num_minibatches} x {self.cfg.batch_size} of {self.seen.packed.shape[1]} demonstrated steps"

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"demonstrations": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["demonstrations"] != self._digest:
            warn("the demonstrations differ from those used before the resume")


class Distill(OnPolicy):
    """Policy distillation: regression on a teacher's mean actions in the student's states.

    The student acts and the teacher labels its states (DAgger, Ross et al. 2011, arXiv 1011.0686, with beta = 0; Rusu
    et al. 2016, arXiv 1511.06295). Gradients pass through `sequence_length` control steps. A minibatch mixes steps from
    the whole rollout, since all envs may need the same action at the same time.
    """

    Config = DistillConfig

    cfg: DistillConfig

    def __init__(self, cfg: Any, env: EnvSpec, context: LearnerContext = DEFAULT_CONTEXT, **rest: Any) -> None:
        # The order of weight initialisations affects fixed-seed runs: the teacher is built first.
        self.labels = Labels(env, context, "teacher", cfg.teacher, cfg.horizon, rest["device"])
        super().__init__(cfg, _seen(env), context, **rest)

    make_policy = classmethod(_make_student)  # type: ignore[reportAssignmentType]

    def loss_weights(self) -> dict[str, float]:
        return {IMITATION: 1.0}

    def fit_minibatches(self, samples: int) -> int:
        return self.horizon // fit_sequence_length(self.horizon, self.cfg.sequence_length)

    def record(self, action: Tensor, step: Transition) -> None:
        self.labels.record(self.exploration.step, self.exploration.acted_on, step.done)
        super().record(action, step)

    def update(self) -> dict[str, Tensor]:
        self.steps.anneal(self.max_iterations)
        rollout = self.rollout
        inputs = {**self.policy.inputs(rollout.obs), LABEL: self.labels.actions}
        batch = Sequences.of(rollout, inputs, rollout.valid.float()[..., None])
        weight, steps = batch.packed[..., 0], []
        draw = self.num_minibatches, self._shuffle_generator, self.collective
        valid = weight.clone()
        for _ in range(self.cfg.epochs):
            steps += [self.step(batch, index) for index in shuffle(weight, valid, *draw)]
        return {"check/obs": rollout.obs["policy"].sum(), **self.end_update(steps)}

    def chunk_loss(self, inputs: dict[str, Tensor], packed: Tensor, hidden: Any, is_first: Tensor | None) -> Tensor:
        mean = self.policy(inputs, hidden, is_first)[0].mode
        distance = DISTANCES[self.cfg.loss](mean, inputs[LABEL], reduction="none").mean(dim=-1)
        return (distance[None] * packed[..., 0]).flatten(1).sum(dim=1)

    def _describe_steps(self) -> str:
        length = self.horizon // self.num_minibatches
        text = fitted(length, self.cfg.sequence_length, f"{self._section}.sequence_length")
        return f"in {self.num_minibatches} x {text} control steps, {self.cfg.epochs} epochs"

    def describe(self) -> dict[str, str]:
        return super().describe() | {"teacher": f"{self.cfg.teacher}, observes {self.labels.group}"}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["episodes"]["teacher"] = self.labels.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.labels.load_state_dict((state["episodes"] or {}).get("teacher"))
