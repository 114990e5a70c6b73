"""Acting, recording, updates and resume of algorithms that learn from a rollout of their own policy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpusim_rl.learn.algorithm import (
    Algorithm,
    EnvSpec,
    Hidden,
    Observation,
    Transition,
    make_generator,
    restore_generator,
)
from gpusim_rl.learn.chunks import Chunks, chunk_samples
from gpusim_rl.learn.distributions import squared_distance
from gpusim_rl.learn.minibatch import Samples, Sequences, fit_sequence_length
from gpusim_rl.learn.networks import ActorCritic, EvaluatedActions, SampledActions
from gpusim_rl.learn.noise import ActionNoise
from gpusim_rl.learn.normalize import moments
from gpusim_rl.learn.optimizer import MaskedAdamW
from gpusim_rl.learn.precision import choose_precision
from gpusim_rl.learn.rollout import Rollout, gae
from gpusim_rl.learn.teacher import LABEL, Teacher
from gpusim_rl.machine.compiled import Compiled
from gpusim_rl.settings.schema import OnPolicyConfig

SOFT_BOUND = 1.1
"""Action means beyond +-1.1 are penalised by the bounds loss, as in rl_games: actions are clipped at 1."""


class OnPolicy(Algorithm):
    """Collects a rollout with the current policy, learns from it, and forgets it.

    The loss is a mean over the valid samples of a batch:

        policy + 0.5 value_coef * value + bounds_coef * bounds - entropy_coef * entropy

    Here the loss of the policy is -log pi(a|s) A, and an iteration is one step of the optimiser on the whole rollout. A
    subclass defines A, or learns more from a rollout.

    The learning rate is a device tensor that the schedule changes in place. Observation statistics are updated after
    the optimisation, so that the policy that learns is the one that acted. Return statistics are updated before it
    (they do not touch the policy), so that the critic's targets have unit scale from the first iteration on.

    In a data-parallel run each process has envs, a rollout and minibatches of its own. Sums over samples (gradients,
    statistics, the moments of advantages) are taken over all processes. So all keep the same weights.

    A step whose gradient is not finite changes nothing, and is counted on the device.

    Attributes:
        rollout: Record of the current iteration.
        hidden: Recurrent state to act on next.
        is_first: Whether an episode begins at the first step of the next rollout, bool [num_envs].
        noise: Random numbers of the actions.
        acted_on: Observations that the last action was sampled for.
        sampled: Actions that were sampled last, and what belongs to them.
        num_sequences: Sequences that the rollout is cut into; those of feed-forward policies are single samples.
        num_minibatches: Minibatches that the sequences are shared out to, one for each step of the optimiser.
    """

    losses: tuple[str, ...] = ("loss/policy", "loss/value", "loss/bounds", "policy/entropy")
    """Names of the statistics of a step, in the order in which its chunks are added up."""

    cfg: Any
    """An `OnPolicyConfig`."""
    _clip: float = 0.0
    """Largest distance of the ratio from 1, and of the value from the old one, where a subclass clips its losses."""
    policy: ActorCritic
    teacher: Teacher | None = None
    """Policy that is imitated, where a subclass does that."""

    def __init__(
        self, cfg: OnPolicyConfig, env: EnvSpec, *, device: torch.device, seed: int, max_iterations: int
    ) -> None:
        self.cfg, self.device, self.horizon, self._section = cfg, device, cfg.horizon, env.section
        self.collective, self.max_iterations = env.collective, max_iterations
        self.policy = self.make_policy(env).to(device)  # type: ignore[reportIncompatibleVariableOverride]
        self.policy.bf16, _ = choose_precision(cfg.precision, device)
        self._noise_generator, self._shuffle_generator = (make_generator(device, seed + i) for i in (1, 2))

        # Acting
        num_envs, head = env.num_envs, self.policy.head
        self.hidden: Hidden = self.policy.initial_state(num_envs)
        self.is_first = torch.ones(num_envs, dtype=torch.bool, device=device)
        self.noise = ActionNoise(cfg.noise, env, horizon=cfg.horizon, columns=head.num_noise, device=device)
        self.acted_on: Observation = {}
        self.sampled: SampledActions | None = None
        self._t = 0
        length = fit_sequence_length(cfg.horizon, cfg.sequence_length) if self.policy.recurrent else 1
        self.rollout = Rollout(
            cfg.horizon,
            env,
            head.num_parameters,
            initial_hidden=self.hidden,
            sequence_length=length,
            device=device,
            valued_images=self.policy.critic_sees_images,
        )

        # Learning
        samples = cfg.horizon * num_envs
        self.num_sequences = samples // length
        self.num_minibatches = self._fit_minibatches(samples)
        # The order decides how the norm of all gradients is rounded: runs of a fixed seed depend on it.
        named = sorted(
            self.policy.named_parameters(), key=lambda pair: (pair[0] != "head.log_std", "log_std_of_state" in pair[0])
        )
        self.learning_rate = torch.tensor(cfg.learning_rate, dtype=torch.float32, device=device)
        parameters = [parameter for _, parameter in named]
        self.optimizer = MaskedAdamW(parameters, self.learning_rate, max_norm=cfg.max_grad_norm, eps=1e-5)
        self.iteration = torch.zeros((), dtype=torch.float32, device=device)
        self.skipped = torch.zeros((), dtype=torch.float32, device=device)  # minibatches, since the training began
        weights = self.loss_weights()
        self._coefficients = torch.tensor([weights.get(name, 0.0) for name in self.losses], device=device)
        self._watched = {name for name in self.losses[2:] if not weights.get(name)}  # which need no gradient
        chunk = chunk_samples(samples // self.num_minibatches) // length
        self._chunks = Chunks(device, chunk, compiled=env.compile)
        self._loss = self._chunk_loss
        if env.compile:
            self._loss = Compiled(self._chunk_loss, f"the loss of {type(self).__name__}", one_shape=False)

    def make_policy(self, env: EnvSpec) -> ActorCritic:
        """Makes actor and critic, float32, on the CPU."""
        return ActorCritic(self.cfg, env)

    def loss_weights(self) -> dict[str, float]:
        """Returns the weights of the `losses` that are learned from."""
        cfg = self.cfg
        bounds, entropy = cfg.bounds_coef, -cfg.entropy_coef
        weights = {"loss/policy": 1.0, "loss/value": 0.5 * cfg.value_coef}
        return {**weights, "loss/bounds": bounds, "policy/entropy": entropy}

    # Acting

    def begin_rollout(self) -> None:
        """Draws the noise of all steps: one operation, and none that follows physics in a graph."""
        self._t = 0  # also after a rollout that was broken off
        self.noise.begin_rollout(lambda numbers: self.policy.head.draw_(numbers, self._noise_generator))

    def act(self, obs: Observation) -> Tensor:
        """Samples actions [num_envs, actions]; a teacher tells what it would do."""
        if self.teacher is not None:
            self.teacher.act(obs)
        self.acted_on, self.sampled = obs, self.policy.sample(obs, self.hidden, self.noise.now)
        return self.sampled.action

    def record(self, action: Tensor, step: Transition) -> None:
        """Writes the step into the rollout and carries the recurrent state over to the next one."""
        assert self.sampled is not None, "act() comes before record()"
        if self.teacher is not None:
            self.teacher.record(self._t, step.done)
        self.rollout.write(self._t, self.acted_on, self.hidden, self.is_first, self.sampled, step)
        for state, new in zip(self.hidden, self.sampled.hidden, strict=True):
            state.copy_(new.masked_fill(step.done[None, :, None], 0.0))
        self._t = (self._t + 1) % self.horizon
        if self._t == 0:
            self.is_first.copy_(step.done)
        self.noise.advance(self._t, step.done)

    def begin_episodes(self) -> None:
        """Begins new episodes in all envs: forgets the recurrent state, and what noise was held."""
        for state in self.hidden:
            state.zero_()
        self.is_first.fill_(True)
        self.noise.begin_episodes()
        if self.teacher is not None:
            self.teacher.begin_episodes()

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
        numbers, made = self._numbers(self._learn(batch))
        self.iteration += 1
        self._observe()
        used = made.float().sum()
        self.skipped += len(made) - used
        means = numbers.sum(dim=0) / used.clamp(min=1.0)
        stats |= dict(zip((*self.losses, "policy/grad_norm"), means.unbind(), strict=True))
        stats |= {"policy/skipped_minibatches": self.skipped.clone(), "check/learned": (used > 0).float()}
        stats["policy/learning_rate"] = self.learning_rate.clone()
        return stats | self.policy.head.stored(rollout.distribution).stats()

    def _observe(self) -> None:
        """Adds the rollout to the statistics of observations."""
        for group, norm in self.policy.obs_norm.items():
            frames = self.rollout.obs[group].flatten(0, 1), self.rollout.valid.flatten()
            norm.update(*frames, self.collective)  # type: ignore[operator]

    @torch.no_grad()
    def _prepare(self) -> tuple[Sequences, dict[str, Tensor]]:
        """Arranges the rollout for training, with advantages and targets; returns it, and numbers for the log."""
        policy, cfg, rollout = self.policy, self.cfg, self.rollout
        counts, valid = rollout.valid, rollout.valid.float()
        value, next_value = (policy.denormalize_value(x) for x in (rollout.value, self._next_value()))
        reward = self.learned_reward()
        advantage, returns = self.advantages(reward, value, next_value, rollout.terminated, rollout.done, counts)
        policy.update_value_norm(returns.flatten(), counts.flatten(), self.collective)
        (mean, mean_return), (variance, return_variance) = moments(
            torch.stack([advantage, returns]), valid, self.collective
        )
        observed = *rollout.obs.values(), *rollout.later_obs.values()
        stats = {
            "value/explained_variance": 1.0 - variance / return_variance.clamp(min=1e-12),
            "value/mean_return": mean_return,
            # finite sums of finite numbers: a flag that costs one reduction and no read
            "check/obs": torch.stack([x.sum() for x in observed if x.is_floating_point()]).sum(),
            "check/reward": rollout.reward.sum(),
        }
        if cfg.normalize_advantage:
            advantage = (advantage - mean) / (variance.sqrt() + 1e-8)

        inputs = self._inputs()
        if policy.mlp_bf16 and not policy.recurrent:
            # the first layer rounds its input to bf16 anyway; doing it once halves what every epoch gathers
            inputs = {name: x if name == LABEL else x.bfloat16() for name, x in inputs.items()}
        samples = Samples.of(
            rollout.action,
            rollout.distribution,
            policy.head.stored(rollout.distribution).log_prob(rollout.action),
            advantage=advantage,
            value=policy.normalize_value(value),
            target=policy.normalize_value(returns),
            valid=valid,
            clip=self._clip,
        )
        return Sequences.of(rollout, inputs, samples.pack()), stats

    def learned_reward(self) -> Tensor:
        """Returns the rewards to learn from, [T, N]."""
        return self.rollout.reward * self.cfg.reward_scale

    def _inputs(self) -> dict[str, Tensor]:
        """Returns what the loss needs of the observations, normalised, [T, N, size] each."""
        return self.policy.normalize(self.rollout.obs)

    def _next_value(self) -> Tensor:
        """Returns V of the observation after each step, as the network gives it, [T, N]."""
        rollout = self.rollout
        later_obs = {group: x.flatten(0, 1) for group, x in rollout.later_obs.items()}  # one batch
        hidden = tuple(state.transpose(0, 1).flatten(1, 2) for state in rollout.later_hidden)
        last_value, *final_values = self.policy.value(later_obs, hidden).unflatten(0, (-1, rollout.num_envs))
        return rollout.next_values(last_value, torch.stack(final_values))

    def advantages(self, *rollout: Tensor) -> tuple[Tensor, Tensor]:
        """Returns advantages and targets of the critic, [T, N]; takes the tensors that `gae` takes."""
        return gae(*rollout, gamma=self.cfg.gamma, gae_lambda=self.cfg.gae_lambda)

    def _learn(self, batch: Sequences) -> list[tuple[Tensor, Tensor]]:
        """Makes all steps of the optimiser.

        Returns:
            Of each step its `losses`, and the norm of the gradient: not finite where the step was left out.
        """
        index, weight = torch.arange(self.num_sequences, device=self.device), Samples.weight_of(batch.packed)
        [count] = self.collective.sum([weight.sum()])
        weight.div_(count.clamp_(min=1.0))
        losses, norm, skip = self._gradient(batch, index)
        self._step(norm, skip)
        return [(losses, norm)]

    @staticmethod
    def _numbers(steps: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Returns losses and norm of each step, zeros where it was left out, and whether it was made, [steps]."""
        losses, norms = (torch.stack(numbers) for numbers in zip(*steps, strict=True))
        made = norms < torch.inf
        return torch.cat([losses, norms[:, None]], dim=1).masked_fill_(~made[:, None], 0.0), made

    def _shuffle(self, weight: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        """Draws the minibatches of an epoch, and writes into `weight` each sample's share of the mean over its own one.

        Args:
            weight: Weights of the samples, [steps, sequences].
            valid: 1 for each sample that counts, else 0, [steps, sequences].

        Returns:
            Indices of the sequences of each minibatch.
        """
        size = self.num_sequences // self.num_minibatches
        order = torch.randperm(self.num_sequences, generator=self._shuffle_generator, device=self.device)
        shuffled = valid.index_select(1, order).unflatten(1, (-1, size))
        [counts] = self.collective.sum([shuffled.sum(dim=(0, 2))])
        weight.index_copy_(1, order, (shuffled / counts.clamp_(min=1.0)[:, None]).flatten(1))
        return order.split(size)

    def _gradient(self, batch: Sequences, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes the gradient of a minibatch of `index`, the sum over its chunks, and gives it to the optimiser.

        Returns:
            Its `losses`; the norm of the gradient, and whether that is not finite.
        """

        def gradient(sequences: Tensor) -> tuple[Tensor, ...]:
            chunk = batch.select(sequences)
            losses = self._loss(chunk.inputs, chunk.packed, chunk.hidden, chunk.is_first)
            return losses.detach(), *self.optimizer.gradients(losses, self._coefficients)

        losses, *gradients = self.collective.sum(self._chunks.sum(gradient, index))
        return losses, *self.optimizer.set_gradients(gradients)

    def _step(self, norm: Tensor, skip: Tensor) -> None:
        """Makes a step of the optimiser by its gradient of this norm; none where it is to `skip`, bool []."""
        self.optimizer.masked_step(norm, skip)
        self.policy.head.clamp_()

    def _chunk_loss(self, inputs: dict[str, Tensor], packed: Tensor, hidden: Hidden, is_first: Tensor | None) -> Tensor:
        """Returns the `losses` of a chunk, each a weighted sum over its samples."""
        old = Samples.unpack(packed, self.rollout.action.shape[-1], self.policy.head.num_parameters)
        terms = self._evaluate(old, inputs, hidden, is_first)
        rows = [terms[name].detach() if name in self._watched else terms[name] for name in self.losses]
        return (torch.stack(rows) * old.weight).flatten(1).sum(dim=1)

    def _evaluate(self, old: Samples, inputs: dict[str, Tensor], *state: Any) -> dict[str, Tensor]:
        """Returns the `losses` of each sample by name, from the policy of now; `state` is the recurrent one."""
        return self.sample_losses(old, self.policy.evaluate(inputs, old.action, *state))

    def sample_losses(self, old: Samples, now: EvaluatedActions) -> dict[str, Tensor]:
        """Returns the `losses` of each sample by name, from the rollout and from the policy of now."""
        return {
            "loss/policy": old.cost * now.log_prob,
            "loss/value": squared_distance(now.value, old.target),
            "loss/bounds": now.distribution.excess(SOFT_BOUND),
            "policy/entropy": now.entropy,
        }

    def _fit_minibatches(self, samples: int) -> int:
        """Returns the number of minibatches of a rollout of so many samples."""
        return 1

    # For the start of a run, and for a resume

    def describe(self) -> dict[str, str]:
        """Returns network and batch."""
        net, rollout = self.cfg.network, self.rollout
        layers = net._target_ or f"{'x'.join(map(str, net.hidden))} {net.activation}"
        if self.policy.encoder is not None:
            layers = f"{net.encoder.describe()}, {layers}"
        samples = f"{rollout.num_envs} x {self.horizon} = {rollout.num_envs * self.horizon} samples"
        sequences = f", sequences of {self._fitted('sequence_length', rollout.sequence_length)}"
        return {
            "network": f"{layers}, {sum(p.numel() for p in self.policy.parameters()):,} parameters",
            "batch": f"{samples}{sequences if self.policy.recurrent else ''}, {self._describe_steps()}",
        }

    def _describe_steps(self) -> str:
        """Returns the steps of the optimiser in words."""
        return "one step"

    def _fitted(self, name: str, value: int) -> str:
        """Returns a number, and the setting that it was fitted to where that is another one."""
        wanted = getattr(self.cfg, name)
        return f"{value}" if value == wanted else f"{value} (fitted: {self._section}.{name}={wanted})"

    def state_dict(self) -> dict[str, Any]:
        """Returns optimiser, learning rate, counters, random generators; of the episodes recurrent states and noise."""
        of_teacher = {} if self.teacher is None else {"teacher": self.teacher.state_dict()}
        return {
            "optimizer": self.optimizer.moments(),
            "learning_rate": self.learning_rate.clone(),
            "configured_learning_rate": self.cfg.learning_rate,
            "configured_schedule": self.cfg.schedule,
            "iteration": self.iteration.clone(),
            "skipped": self.skipped.clone(),
            "noise_generator": self._noise_generator.get_state(),
            "shuffle_generator": self._shuffle_generator.get_state(),
            "episodes": {
                "hidden": [state.clone() for state in self.hidden],
                "is_first": self.is_first.clone(),
                "noise": self.noise.state_dict(),
                **of_teacher,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`. Another `learning_rate` or `schedule` in the settings starts the schedule again."""
        self.optimizer.load_moments(state["optimizer"])
        rate, schedule = self.cfg.learning_rate, self.cfg.schedule
        before = state["configured_learning_rate"], state.get("configured_schedule", schedule)
        if schedule != "constant" and before == (rate, schedule):
            self.learning_rate.copy_(state["learning_rate"])
        else:
            self.learning_rate.fill_(rate)
        self.iteration.copy_(state["iteration"])
        self.skipped.copy_(state["skipped"])
        restore_generator(self._noise_generator, state["noise_generator"])
        restore_generator(self._shuffle_generator, state["shuffle_generator"])
        episodes = state["episodes"]
        if episodes is None:
            self.begin_episodes()
            return
        for hidden, saved in zip(self.hidden, episodes["hidden"], strict=True):
            hidden.copy_(saved)
        self.is_first.copy_(episodes["is_first"])
        self.noise.load_state_dict(episodes["noise"])
        if self.teacher is not None and "teacher" in episodes:
            self.teacher.load_state_dict(episodes["teacher"])
