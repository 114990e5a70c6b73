"""What algorithms that learn from a rollout of their own policy have in common: acting, recording, updates, resume."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Shaped
from torch import Tensor

from gpusim_rl.learn.algorithm import (
    Algorithm,
    EnvSpec,
    Hidden,
    Observation,
    Recorded,
    Transition,
    make_generator,
    restore_generator,
)
from gpusim_rl.learn.chunks import Chunks, chunk_samples
from gpusim_rl.learn.distributions import squared_distance
from gpusim_rl.learn.networks import ActorCritic, Evaluation, Sample
from gpusim_rl.learn.noise import ActionNoise
from gpusim_rl.learn.optimizer import MaskedAdamW
from gpusim_rl.learn.precision import choose_precision
from gpusim_rl.learn.rollout import Rollout, gae
from gpusim_rl.machine.compiled import reason_of
from gpusim_rl.settings.schema import OnPolicyConfig

logger = logging.getLogger("gpusim_rl")

SOFT_BOUND = 1.1
"""Action means beyond +-1.1 are penalised by the bounds loss, as in rl_games: actions are clipped at 1."""


def fit_sequence_length(horizon: int, wanted: int) -> int:
    """The largest divisor of the horizon that is not longer than wanted."""
    return max(d for d in range(1, min(horizon, wanted) + 1) if horizon % d == 0)


@dataclass(slots=True)
class Samples:
    """What the loss needs of each sample, beside the inputs of the networks; the leading dimensions are the batch."""

    action: Tensor
    """[*batch, actions]"""
    distribution: Tensor
    """Parameters of the distribution that the action was drawn from, [*batch, parameters]."""
    log_prob: Tensor
    value: Tensor
    """Old prediction, at the scale of the network."""
    advantage: Tensor
    target: Tensor
    """Return, at the scale of the network."""
    valid: Tensor
    """1.0 where the sample counts, else 0.0."""

    def pack(self) -> Tensor:
        """All of it side by side, [*batch, columns], so that a minibatch is one gather."""
        scalars = torch.stack([self.log_prob, self.value, self.advantage, self.target, self.valid], dim=-1)
        return torch.cat([self.action, self.distribution, scalars], dim=-1)

    @classmethod
    def unpack(cls, packed: Tensor, num_actions: int, num_parameters: int) -> Samples:
        """Undoes `pack`."""
        action, distribution, scalars = packed.split([num_actions, num_parameters, 5], dim=-1)
        return cls(action, distribution, *scalars.unbind(-1))

    @staticmethod
    def valid_of(packed: Tensor) -> Tensor:
        """`valid` of a packed batch, without unpacking the rest."""
        return packed[..., -1]


@dataclass(slots=True)
class Batch:
    """A rollout arranged for training: [steps per sequence, sequences, ...]; feed-forward policies have one step."""

    inputs: dict[str, Tensor]
    """Normalised observations."""
    packed: Tensor
    """`Samples.pack`."""
    hidden: Hidden
    """Recurrent state before each sequence, [layers, sequences, size]."""
    is_first: Tensor | None
    """An episode begins at this step; None for feed-forward policies."""

    def select(self, index: Tensor) -> Batch:
        """The sequences of a minibatch."""
        return Batch(
            {group: value.index_select(1, index) for group, value in self.inputs.items()},
            self.packed.index_select(1, index),
            tuple(h.index_select(1, index) for h in self.hidden),
            None if self.is_first is None else self.is_first.index_select(1, index),
        )


class OnPolicy(Algorithm):
    """Collects a rollout with the policy as it is, learns from it, and forgets it.

    Losses are means over the valid samples of a batch:

        policy + 0.5 value_coef * value + bounds_coef * bounds - entropy_coef * entropy

    As it stands here the loss of the policy is -log pi(a|s) A, and an iteration is one step of the optimiser on the
    whole rollout. The samples are then from the policy itself, so no ratio of probabilities is needed. A subclass says
    what A is, or how to learn more from a rollout.

    The learning rate is a device tensor that the schedule changes in place. Observation statistics are updated after
    the optimisation, so that the policy that learns is the one that acted. Return statistics are updated before it
    (they do not touch the policy), so that the critic's targets have unit scale from the first iteration on.

    In a data-parallel run each process has a rollout of its own envs, and minibatches of it. Sums over samples are
    taken over all processes: advantages are normalised by the mean and deviation of all, a gradient is that of the
    samples of all, and so are the KL and the statistics. So all processes keep the same weights, without exchanging
    them.

    A step whose gradient is not finite is skipped: weights, optimiser, learning rate and the statistics of the update
    are as if it had not been there. It is counted on the device.

    Args:
        cfg: Settings.
        env: The environments.
        device: Where everything lives.
        seed: Of the exploration noise and of the order of minibatches.
        max_iterations: Updates in a whole training, for the linear schedule.

    Attributes:
        rollout: What the current iteration recorded.
        hidden: Recurrent state to act on next.
        is_first: An episode begins at the first step of the next rollout, bool [num_envs].
        num_minibatches: Parts that the rollout is cut into, one for each step of the optimiser.
        sequence_length: Steps per training sequence, fitted to divide the horizon; 1 for feed-forward policies.
    """

    losses: ClassVar[tuple[str, ...]] = ("loss/policy", "loss/value", "loss/bounds", "policy/entropy")
    """Names of the statistics of a step, in the order in which its chunks are added up."""

    cfg: Any
    """An `OnPolicyConfig`."""
    policy: ActorCritic

    def __init__(
        self, cfg: OnPolicyConfig, env: EnvSpec, *, device: torch.device, seed: int, max_iterations: int
    ) -> None:
        self.cfg, self.device, self.horizon, self._role = cfg, device, cfg.horizon, env.role
        self._section = env.section
        bf16, self._precision_reason = choose_precision(cfg.precision, device)
        policy = self._make_policy(env).to(device)
        self.policy = policy  # type: ignore[reportIncompatibleVariableOverride]
        self.policy.bf16 = bf16
        self._noise_generator, self._shuffle_generator = (make_generator(device, seed + i) for i in (1, 2))
        self.generators = (self._noise_generator, self._shuffle_generator)

        # Acting
        num_envs, head = env.num_envs, self.policy.head
        self.hidden: Hidden = self.policy.initial_state(num_envs)
        self.is_first = torch.ones(num_envs, dtype=torch.bool, device=device)
        self.noise = ActionNoise(
            cfg.noise,
            f"{env.section}.noise",
            horizon=cfg.horizon,
            num_envs=num_envs,
            columns=head.num_noise,
            space=env.action_space,
            device=device,
        )
        self._t = 0
        self._obs: Observation = {}
        self._sample: Sample | None = None

        # Learning
        samples, wanted = cfg.horizon * num_envs, cfg.sequence_length
        self.sequence_length = fit_sequence_length(cfg.horizon, wanted) if self.policy.recurrent else 1
        self.num_units = samples // self.sequence_length
        self.num_minibatches = self._fit_minibatches(samples)
        self.rollout = Rollout(
            cfg.horizon,
            env,
            env.action_space.size,
            head.num_parameters,
            initial_hidden=self.hidden,
            sequence_length=self.sequence_length,
            device=device,
        )
        # The order decides how the norm of all gradients is rounded: runs of a fixed seed depend on it.
        named = sorted(
            self.policy.named_parameters(), key=lambda pair: (pair[0] != "head.log_std", "log_std_of_state" in pair[0])
        )
        parameters = [parameter for _, parameter in named]
        chunk = chunk_samples(samples // self.num_minibatches)
        self._chunks = Chunks(device, chunk // self.sequence_length)
        self.max_iterations = max_iterations
        self.iteration = torch.zeros((), dtype=torch.float32, device=device)
        self.learning_rate = torch.tensor(cfg.learning_rate, dtype=torch.float32, device=device)
        self.optimizer = MaskedAdamW(parameters, self.learning_rate, max_norm=cfg.max_grad_norm, eps=1e-5)
        self.skipped = torch.zeros((), dtype=torch.float32, device=device)  # minibatches, since the training began
        weights = {
            "loss/policy": 1.0,
            "loss/value": 0.5 * cfg.value_coef,
            "loss/bounds": cfg.bounds_coef,
            "policy/entropy": -cfg.entropy_coef,
        }
        self._coefficients = torch.tensor([weights.get(name, 0.0) for name in self.losses], device=device)
        self._loss = self._eager_loss
        self._compile_errors: tuple[type[Exception], ...] = ()

    def compile(self, enabled: bool = True) -> None:
        """Compiles the loss: faster updates, for some 20 s at the first start and 5 s at later ones.

        Where torch cannot compile it, it runs as it is from then on, and one warning says why.
        """
        if enabled:
            from torch._dynamo.exc import TorchDynamoException  # takes a second

            self._compile_errors = (TorchDynamoException,)
        self._loss = torch.compile(self._eager_loss) if enabled else self._eager_loss
        self._chunks.threads = not enabled

    def _make_policy(self, env: EnvSpec) -> ActorCritic:
        """Actor and critic, float32, on the CPU."""
        cfg = self.cfg
        return ActorCritic(
            env.obs_sizes,
            env.action_space,
            cfg.network,
            normalize_obs=cfg.normalize_obs,
            normalize_value=cfg.normalize_value,
            clip_obs=cfg.clip_obs,
            key=f"{env.section}.network",
        )

    # Acting

    def begin_rollout(self) -> None:
        """Draws the noise of all steps: one operation, and none that follows physics in a graph."""
        self._t = 0  # also after a rollout that was broken off
        self.noise.begin_rollout(lambda numbers: self.policy.head.draw_(numbers, self._noise_generator))

    def act(self, obs: Observation) -> Tensor:
        """Samples actions [num_envs, actions]."""
        self._obs, self._sample = obs, self.policy.sample(obs, self.hidden, self.noise.now)
        return self._sample.action

    def record(self, action: Tensor, step: Transition) -> None:
        """Writes the step into the rollout and carries the recurrent state over to the next one."""
        assert self._sample is not None, "act() comes before record()"
        self.rollout.write(self._t, self._obs, self.hidden, self.is_first, self._sample, step)
        for state, new in zip(self.hidden, self._sample.hidden, strict=True):
            state.copy_(new.masked_fill(step.done[None, :, None], 0.0))
        self._t = (self._t + 1) % self.horizon
        if self._t == 0:
            self.is_first.copy_(step.done)
        self.noise.advance(self._t, step.done)

    def begin_episodes(self) -> None:
        """Forgets the recurrent state, and what noise was held."""
        for state in self.hidden:
            state.zero_()
        self.is_first.fill_(True)
        self.noise.begin_episodes()

    def part(self, envs: slice) -> OnPolicy:
        """The same algorithm for some of the envs, in the memory of this one."""
        part = copy.copy(self)
        part.rollout, part.noise = self.rollout.part(envs), self.noise.part(envs)
        part.hidden, part.is_first = tuple(state[:, envs] for state in self.hidden), self.is_first[envs]
        return part

    @staticmethod
    def act_together(parts: Sequence[OnPolicy], obs: Sequence[Observation]) -> list[Tensor]:
        """One batch of all."""
        sizes = [len(part.is_first) for part in parts]
        together = {group: torch.cat([seen[group] for seen in obs]) for group in obs[0]}
        hidden = tuple(torch.cat(states, dim=1) for states in zip(*(part.hidden for part in parts), strict=True))
        sample = parts[0].policy.sample(together, hidden, torch.cat([part.noise.now for part in parts]))
        distribution = sample.distribution.per_sample()
        split = zip(
            sample.action.split(sizes),
            zip(*(x.split(sizes) for x in distribution.parameters), strict=True),
            sample.value.split(sizes),
            zip(*(x.split(sizes, dim=1) for x in sample.hidden), strict=True) if hidden else [()] * len(parts),
            strict=True,
        )
        for part, seen, (action, parameters, value, state) in zip(parts, obs, split, strict=True):
            own = part.policy.head.stored(torch.cat(parameters, dim=-1))
            part._obs, part._sample = seen, Sample(action, own, value, state)
        return [*sample.action.split(sizes)]

    def recording(self) -> list[tuple[Tensor, int]]:
        """The rollout."""
        return self.rollout.memory()

    # Learning

    def update(self) -> dict[str, Tensor]:
        """Learns from the rollout.

        Returns:
            Means over the steps of the optimiser, as 0-dim device tensors.
        """
        cfg, rollout = self.cfg, self.rollout
        if cfg.schedule == "linear":
            self.learning_rate.copy_(cfg.learning_rate * (1.0 - self.iteration / self.max_iterations).clamp(min=0.0))
        batch, stats = self._prepare()
        totals, skipped, steps = self._learn(batch)
        self.iteration += 1
        for group, norm in self.policy.obs_norm.items():
            frames = rollout.obs[group].flatten(0, 1), rollout.valid.flatten()
            norm.update(*frames, self.collective)  # type: ignore[operator]
        self.skipped += skipped
        used = steps - skipped
        means = totals / used.clamp(min=1.0)
        stats |= dict(zip((*self.losses, "policy/grad_norm"), means.unbind(), strict=True))
        stats["policy/skipped_minibatches"] = self.skipped.clone()
        stats["check/learned"] = (used > 0).float()
        stats["policy/learning_rate"] = self.learning_rate.clone()
        return stats | self.policy.head.stored(rollout.distribution).stats()

    def _learn(self, batch: Batch) -> tuple[Tensor, Tensor, int]:
        """All steps of the optimiser.

        Returns:
            Sums over the steps of their statistics (`losses`, and the norm of the gradient); how many steps were
            skipped; how many there were.
        """
        everything = torch.arange(self.num_units, device=self.device)
        [count] = self.collective.sum([Samples.valid_of(batch.packed).sum()])
        numbers, skip = self._gradient(batch, everything, count.clamp_(min=1.0))
        self._step(numbers[-1], skip)
        return numbers, skip.float(), 1

    def _gradient(self, batch: Batch, index: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of a minibatch, the sum over its chunks, into `grad` of the parameters.

        Args:
            batch: All samples.
            index: Sequences of the minibatch.
            count: Its valid samples, of all processes.

        Returns:
            Its statistics: `losses` and the norm of the gradient, 0 where that is not finite; whether it is not.
        """

        def gradient(part: Tensor) -> tuple[Tensor, ...]:
            chunk = batch.select(part)
            loss, losses = self._loss(chunk.inputs, chunk.packed, chunk.hidden, chunk.is_first, count)
            return losses, *torch.autograd.grad(loss, self.optimizer.parameters)

        try:
            losses, *gradients = self._chunks.sum(gradient, index)
        except self._compile_errors as error:
            logger.warning("the loss of %s runs uncompiled: %s", type(self).__name__, reason_of(error))
            self.compile(enabled=False)
            losses, *gradients = self._chunks.sum(gradient, index)
        losses, *gradients = self.collective.sum([losses, *gradients])
        norm, skip = self.optimizer.set_gradients(gradients)
        return torch.cat([losses, norm[None]]).masked_fill_(skip, 0.0), skip

    def _step(self, norm: Tensor, skip: Tensor) -> None:
        """A step of the optimiser.

        Args:
            norm: Norm of the gradient, [].
            skip: Whether nothing may change, bool [].
        """
        self.optimizer.masked_step(norm, skip)
        self.policy.head.clamp_()

    def _eager_loss(
        self, inputs: dict[str, Tensor], packed: Tensor, hidden: Hidden, is_first: Tensor | None, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss of a chunk, and its parts in the order of `losses`; each a sum / `count`."""
        old = Samples.unpack(packed, self.rollout.action.shape[-1], self.policy.head.num_parameters)
        parts = self._parts(old, self.policy.evaluate(inputs, old.action, hidden, is_first))
        weighted = torch.stack([parts[name] for name in self.losses]) * (old.valid / count)
        means = weighted.flatten(1).sum(dim=1)
        return means.dot(self._coefficients), means.detach()

    def _parts(self, old: Samples, now: Evaluation) -> dict[str, Tensor]:
        """The `losses` of each sample by name, the shape of `now.log_prob`.

        Args:
            old: What the rollout knows of the samples.
            now: What the policy says of them.
        """
        return {
            "loss/policy": -old.advantage * now.log_prob,
            "loss/value": squared_distance(now.value, old.target),
            "loss/bounds": now.distribution.excess(SOFT_BOUND),
            "policy/entropy": now.entropy,
        }

    def _fit_minibatches(self, samples: int) -> int:
        """How many minibatches a rollout of so many samples is cut into."""
        return 1

    def _describe_steps(self) -> str:
        """The steps of the optimiser, for the start of a run."""
        return ", one step"

    @torch.no_grad()
    def _prepare(self) -> tuple[Batch, dict[str, Tensor]]:
        """Advantages and targets, and everything arranged by sequences."""
        policy, cfg, rollout = self.policy, self.cfg, self.rollout
        counts = rollout.valid
        # last_obs, then final_obs: one batch
        later_obs = {group: value.flatten(0, 1) for group, value in rollout.later_obs.items()}
        last_hidden = self._hidden_after_rollout()
        later_hidden = (torch.cat([h[None], f]) for h, f in zip(last_hidden, rollout.final_hidden, strict=True))
        later = policy.value(later_obs, tuple(h.transpose(0, 1).flatten(1, 2) for h in later_hidden))
        last_value, *final_values = later.unflatten(0, (-1, rollout.num_envs))
        next_value = rollout.next_values(last_value, torch.stack(final_values))
        value, next_value = policy.denormalize_value(rollout.value), policy.denormalize_value(next_value)
        reward = rollout.reward * cfg.reward_scale
        advantage, returns = self._advantages(reward, value, next_value, rollout.terminated, rollout.done, counts)
        policy.update_value_norm(returns.flatten(), counts.flatten(), self.collective)
        valid = counts.float()
        [number] = self.collective.sum([valid.sum()])
        weight = valid / number.clamp(min=1.0)
        both = torch.stack([advantage, returns])
        [means] = self.collective.sum([(both * weight).sum(dim=(1, 2))])
        [variances] = self.collective.sum([((both - means[:, None, None]).square() * weight).sum(dim=(1, 2))])
        observed = *rollout.obs.values(), *rollout.later_obs.values()
        stats = {
            "value/explained_variance": 1.0 - variances[0] / variances[1].clamp(min=1e-12),
            "value/mean_return": means[1],
            # finite sums of finite numbers: a flag that costs one reduction and no read
            "check/obs": torch.stack([x.sum() for x in observed]).sum(),
            "check/reward": rollout.reward.sum(),
        }
        if cfg.normalize_advantage:
            advantage = (advantage - means[0]) / (variances[0].sqrt() + 1e-8)

        inputs = policy.normalize(rollout.obs)
        if policy.bf16 and not policy.recurrent:
            # the first layer rounds its input to bf16 anyway; doing it once halves what every epoch gathers
            inputs = {group: value.bfloat16() for group, value in inputs.items()}
        samples = Samples(
            rollout.action,
            rollout.distribution,
            policy.head.stored(rollout.distribution).log_prob(rollout.action),
            policy.normalize_value(value),
            advantage,
            policy.normalize_value(returns),
            valid,
        )
        batch = Batch(
            {group: self._by_sequence(value) for group, value in inputs.items()},
            self._by_sequence(samples.pack()),
            tuple(h.transpose(0, 1).flatten(1, 2) for h in rollout.hidden),
            self._by_sequence(rollout.is_first) if policy.recurrent else None,
        )
        return batch, stats

    def _hidden_after_rollout(self) -> Hidden:
        """Recurrent state after the last step of the rollout."""
        return self.hidden

    def _advantages(self, *rollout: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and targets of the critic, [T, N]; takes the tensors that `gae` takes."""
        return gae(*rollout, gamma=self.cfg.gamma, gae_lambda=self.cfg.gae_lambda)

    def _by_sequence(self, x: Shaped[Tensor, "time envs ..."]) -> Tensor:
        """[T, N, ...] -> [L, T / L * N, ...]: consecutive steps of one env stay together."""
        return x.unflatten(0, (-1, self.sequence_length)).transpose(0, 1).flatten(1, 2)

    # What others ask for

    def recorded(self) -> list[Recorded]:
        """Observations and rewards of the rollout."""
        rollout = self.rollout
        return [
            *(Recorded("an observation", x, ("step", "env", "column"), g) for g, x in rollout.obs.items()),
            *(
                Recorded("the last observation of an episode", x, ("", "env", "column"), g)
                for g, x in rollout.final_obs.items()
            ),
            *(
                Recorded("an observation after the last step", x, ("env", "column"), g)
                for g, x in rollout.last_obs.items()
            ),
            Recorded("a reward", rollout.reward, ("step", "env")),
        ]

    def describe(self) -> dict[str, str]:
        """Network and batch."""
        cfg, net, num_envs = self.cfg, self.cfg.network, len(self.is_first)
        layers = net._target_ or f"{'x'.join(map(str, net.hidden))} {net.activation}"
        sequence = ""
        if self.policy.recurrent:
            sequence = f", sequences of {self.sequence_length}"
            if self.sequence_length != cfg.sequence_length:
                sequence += f" (fitted: {self._section}.sequence_length={cfg.sequence_length})"
        samples = f"{num_envs} x {self.horizon} = {num_envs * self.horizon} samples"
        return {
            "network": f"{layers}, {sum(p.numel() for p in self.policy.parameters()):,} parameters",
            "batch": f"{samples}{sequence}{self._describe_steps()}",
        }

    def metadata(self) -> dict[str, Any]:
        """Precision, and whether bf16 is fast here."""
        return {
            "precision": "bf16" if self.policy.bf16 else "fp32",
            "precision_reason": self._precision_reason,
            "bf16_is_fast": choose_precision("auto", self.device)[0],
        }

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, learning rate, counters, recurrent state and random generators."""
        return {
            "optimizer": self.optimizer.moments(),
            "learning_rate": self.learning_rate.clone(),
            "configured_learning_rate": self.cfg.learning_rate,
            "iteration": self.iteration.clone(),
            "skipped": self.skipped.clone(),
            "hidden": [state.clone() for state in self.hidden],
            "is_first": self.is_first.clone(),
            "noise": self.noise.state_dict(),
            "noise_generator": self._noise_generator.get_state(),
            "shuffle_generator": self._shuffle_generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`. Another `learning_rate` in the settings is a new start of the schedule."""
        self.optimizer.load_moments(state["optimizer"])
        self.learning_rate.copy_(state["learning_rate"])
        if state["configured_learning_rate"] != self.cfg.learning_rate:
            self.learning_rate.fill_(self.cfg.learning_rate)
        self.iteration.copy_(state["iteration"])
        self.skipped.copy_(state.get("skipped", torch.zeros_like(self.skipped)))
        # A learner of actors does not act, and its checkpoint knows nothing of envs.
        if self._role == "both" and state["is_first"].shape == self.is_first.shape:
            for own, saved in zip(self.hidden, state["hidden"], strict=True):
                own.copy_(saved)
            self.is_first.copy_(state["is_first"])
            self.noise.load_state_dict(state.get("noise", {}))
        restore_generator(self._noise_generator, state["noise_generator"])
        restore_generator(self._shuffle_generator, state["shuffle_generator"])
