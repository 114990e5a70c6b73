"""Base class of algorithms that learn from a replay buffer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from gpusim_rl.errors import ConfigError, warn
from gpusim_rl.learn import demonstrations
from gpusim_rl.learn.algorithm import (
    DEFAULT_CONTEXT,
    PRECISIONS,
    Algorithm,
    EnvSpec,
    LearnerContext,
    Observation,
    Transition,
    choose_precision,
    make_generator,
    restore_generator,
)
from gpusim_rl.learn.choose_replay import describe_replay, make_replay
from gpusim_rl.learn.encoders import random_shift
from gpusim_rl.learn.noise import ActionNoise
from gpusim_rl.learn.optimizer import MaskedAdamW
from gpusim_rl.learn.prioritized import Priorities
from gpusim_rl.learn.q_networks import Critic, QPolicy, project
from gpusim_rl.learn.replay import Replay, Trajectory, Transitions
from gpusim_rl.machine.compiled import Compiled
from gpusim_rl.settings.schema import OffPolicyConfig
from gpusim_rl.spaces import Box


@dataclass(slots=True)
class Batch(Transitions):
    """Transitions of one update, normalised; weights sum to 1 (or 0) over all processes."""

    noise: Tensor
    """Noise for target and actor loss, [2, batch, actions]."""
    ahead: tuple[Tensor, Tensor] | None = None
    """Result of `next_action`, if already computed."""
    following: tuple[Tensor, Tensor | None] | None = None
    """Outputs of the target critics and the bonus, if already computed."""


class OffPolicy(Algorithm):
    """Base class of off-policy algorithms: act, store the results in a replay buffer, learn from its samples.

    An iteration draws and normalises the transitions of all its updates at once. Observations are stored raw; each new
    frame enters their statistics once, after the updates. Until `learning_starts`, actions are random and updates run
    without effect, so one CUDA graph serves both phases. In a data-parallel run, sums over samples are all-reduced.
    """

    policy_class: ClassVar[Callable[..., QPolicy]]
    """Policy class."""
    discrete: ClassVar[bool] = False
    """True if discrete actions are supported."""
    num_noise: ClassVar[int] = 0
    """Random numbers per env and step in addition to the action noise."""
    actor_losses: ClassVar[tuple[str, ...]] = ()
    """Names of the values that `actor_loss` returns, starting with the loss."""

    cfg: Any
    """An `OffPolicyConfig`."""
    policy: QPolicy

    def __init__(
        self,
        cfg: OffPolicyConfig,
        env: EnvSpec,
        context: LearnerContext = DEFAULT_CONTEXT,
        *,
        device: torch.device,
        seed: int,
        max_iterations: int,
    ) -> None:
        self.cfg, self.device, self.horizon, self.section = cfg, device, cfg.horizon, context.section
        if not (self.discrete or isinstance(env.action_space, Box)):
            raise ConfigError("discrete actions are not supported", key=f"algo={self.section}", hint="Try algo=dqn")
        self.num_envs, self.num_actions = env.num_envs, env.action_space.size
        self.collective, self._max_steps = context.collective, max_iterations * cfg.horizon
        self.policy = self.make_policy(cfg, env, context, device)  # type: ignore[reportIncompatibleVariableOverride]
        self.policy.reduced = PRECISIONS[choose_precision(cfg.precision, device)[0]]
        self._act_generator, self._sample_generator = (make_generator(device, seed + i) for i in (1, 2))

        columns, key = self.num_actions + self.num_noise, f"{self.section}.noise"
        self.noise = ActionNoise(cfg.noise, env, key, horizon=cfg.horizon, columns=columns, device=device)
        self.memory = Trajectory.empty(cfg.horizon, env, self.policy.groups, device)
        self.hidden = self._next_hidden = self.policy.initial_state(env.num_envs)  # older frames of the stacks
        self.acted_on: Observation = {}
        self.steps = torch.zeros((), dtype=torch.int64, device=device)  # control steps since training began

        self.priorities: Priorities | None = None
        self.replay: Any = None  # None in an actor
        if context.actor is not None:
            return

        self._shift = cfg.network.encoder.shift
        self._time_limit = env.max_episode_length
        self._digest: str | None = None  # digest of the demonstrations
        self._num_shown, self._imitates = 0, False  # demonstrated transitions per batch
        self.demonstrations = self._load_demonstrations(env)
        drawn = cfg.horizon * cfg.updates * (cfg.batch_size - self._num_shown)
        self.replay = make_replay(cfg, env, self.memory, self.section, device=device, seed=seed + 3, drawn=drawn)
        if cfg.replay.alpha > 0.0:
            assert isinstance(self.replay, Replay)
            self.priorities = Priorities(self.replay, cfg.replay.alpha)
        policy, encoder = self.policy, [] if self.policy.encoder is None else [self.policy.encoder]
        with_critic, with_actor = (encoder, []) if policy.critic_sees_images else ([], encoder)
        self.critic_optimizer = self._make_optimizer(policy.critic, *with_critic)
        self.actor_optimizer = None if policy.actor is None else self._make_optimizer(policy.actor, *with_actor)
        self._targets, self._online = self.policy.target_pairs()
        self.skipped = torch.zeros((), dtype=torch.float32, device=device)  # skipped updates since training began
        compiled, name = partial(Compiled, now=context.compile), type(self).__name__
        self._critic_loss = compiled(self.critic_loss, f"the {name} critics' loss")
        self._actor_loss = compiled(self.actor_loss, f"the {name} actor's loss")

    def _make_optimizer(self, *networks: nn.Module) -> MaskedAdamW:
        cfg, parameters = self.cfg, [p for network in networks for p in network.parameters()]
        options: dict[str, Any] = {"weight_decay": cfg.weight_decay, "max_norm": cfg.max_grad_norm}
        return MaskedAdamW(parameters, cfg.learning_rate, **options, scaled=self.policy.reduced is torch.float16)

    @classmethod
    def make_policy(cls, cfg: Any, env: EnvSpec, context: LearnerContext, device: torch.device) -> QPolicy:
        """Build the networks."""
        return cls.policy_class(cfg, env, context.section).to(device)

    def _load_demonstrations(self, env: EnvSpec) -> Replay | None:
        file = self.cfg.demonstrations.file
        if file is None:
            return None
        key = f"{self.section}.demonstrations.file"
        if env.images:
            raise ConfigError("image observations are not supported", key=key, hint=f"Try {key}=null")
        cfg, memory = self.cfg, {"n_step": self.cfg.n_step, "gamma": self.cfg.gamma, "device": self.device}
        try:
            shown, self._digest = demonstrations.load(file, env, self.policy.groups)
            replay = demonstrations.make_replay(shown, env, self.policy.groups, **memory)
        except ConfigError as error:
            raise error.within(key) from None
        self._num_shown = min(max(1, round(cfg.demonstrations.share * cfg.batch_size)), cfg.batch_size - 1)
        self._imitates = cfg.demonstrations.imitation > 0.0
        return replay

    def begin_rollout(self) -> None:
        """Draw the noise of all steps at once, outside the CUDA graphs of single steps."""
        self.memory.t = 0
        self.noise.begin_rollout(self._draw_noise)

    def _draw_noise(self, numbers: Tensor) -> None:
        numbers.normal_(generator=self._act_generator)

    @torch.no_grad()
    def act(self, obs: Observation) -> Tensor:
        """Return exploratory actions, [num_envs, actions]."""
        self.acted_on = obs
        return self.choose(self.outputs(obs))

    def outputs(self, obs: Observation) -> Tensor:
        """Run the acting networks on raw observations."""
        outputs, self._next_hidden = self.policy.outputs(obs, self.hidden)
        return outputs

    def choose(self, outputs: Tensor) -> Tensor:
        """Convert network outputs to exploratory actions."""
        noise = self.noise.now[:, : self.num_actions]
        uniform = torch.erf(noise * math.sqrt(0.5)) * self.cfg.action_scale  # uniform
        starts = self.steps * self.num_envs < self.cfg.learning_starts
        return torch.where(starts, uniform, self.explore(outputs, noise))

    def explore(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Return exploratory actions for the actor's outputs and noise."""
        raise NotImplementedError

    def record(self, action: Tensor, step: Transition) -> None:
        """Record the step; store a finished rollout in the replay buffer."""
        self.memory.write(self.acted_on, action, step)
        for frames, new in zip(self.hidden, self._next_hidden, strict=True):
            torch.mul(new, ~step.done[:, None], out=frames)
        self.steps += 1
        if self.memory.t == 0 and self.replay is not None:
            self.store()
        self.noise.advance(self.memory.t, step.done)

    def store(self) -> None:
        """Store the rollout in the replay buffer."""
        self.replay.extend(self.memory)
        if self.priorities is not None:
            self.priorities.after_write(self.horizon)

    def begin_episodes(self) -> None:
        """Start new episodes in all envs; no n-step window crosses this point."""
        if self.replay is not None:
            self.replay.cut()
        for frames in self.hidden:
            frames.zero_()
        self.noise.begin_episodes()

    def before_update(self) -> None:
        """Exchange transitions with a replay buffer on the host."""
        self.replay.exchange()

    def update(self) -> dict[str, Tensor]:
        """Learn from `horizon * updates` batches; return metrics, 0-dim device tensors."""
        cfg, number = self.cfg, self.horizon * self.cfg.updates
        stored = self.replay.fill * self.num_envs
        waits = stored < max(cfg.learning_starts, (cfg.n_step + 1) * self.num_envs)  # at least one n-step window
        limit = torch.full_like(waits, torch.inf, dtype=torch.float32).masked_fill_(waits, 0.0)  # of gradient norms
        critic, actor, batches = [], [], self._draw(number)
        for index, batch in enumerate(batches):
            delay = cfg.policy_delay if self.actor_optimizer is not None else number
            if index % delay == 0:
                self.look_ahead(batches[index : index + delay])
            moves_actor = self.actor_optimizer is not None and (index + 1) % delay == 0
            if self.policy.encoder is not None:
                self._look(batch, moves_actor)
            critic.append(self._critic_step(batch, limit))
            if moves_actor:
                actor.append(self._actor_step(batch, limit))
            with torch.no_grad():
                torch._foreach_lerp_(self._targets, self._online, cfg.tau)  # type: ignore[reportPrivateImportUsage]
        skipped = (~(torch.stack([norm for *_, norm in critic + actor]) < torch.inf)).sum()
        self.skipped += skipped
        stats = {
            **self._critic_numbers(critic, torch.stack([batch.weight for batch in batches])),
            **self._actor_numbers(actor),
            "policy/skipped_minibatches": self.skipped.clone(),
            "replay/transitions": stored.float(),
            "check/learned": (waits | (skipped < len(critic) + len(actor))).float(),
        }
        return stats | self._look_at_new_frames()

    @torch.no_grad()
    def _draw(self, number: int) -> list[Batch]:
        cfg, policy = self.cfg, self.policy
        size = number * cfg.batch_size
        if self.demonstrations is not None:
            shown = number * self._num_shown
            memories = (self.replay, size - shown), (self.demonstrations, shown)
            parts = [memory.sample(n, self._sample_generator) for memory, n in memories]
            # demonstrations come last in each batch
            drawn = tree_map(lambda *x: torch.cat([y.unflatten(0, (number, -1)) for y in x], 1).flatten(0, 1), *parts)
        elif self.priorities is None:
            drawn = self.replay.sample(size, self._sample_generator)
        else:
            start = cfg.replay.beta
            beta = (self.steps * ((1.0 - start) / self._max_steps)).clamp_(max=1.0 - start).add_(start)
            drawn = self.priorities.sample(size, self._sample_generator, beta)
        obs, next_obs = policy.normalize(drawn.obs), policy.normalize(drawn.next_obs)
        weight = drawn.weight.view(number, -1)
        [total] = self.collective.sum([weight.sum(dim=1, keepdim=True)])
        weight = weight / total.clamp_(min=torch.finfo(torch.float32).tiny)
        reward = drawn.reward if cfg.reward_scale == 1.0 else drawn.reward * cfg.reward_scale
        noise = self._draw_batch_noise(number, 2, cfg.batch_size, self.num_actions)

        def split(x: Tensor) -> tuple[Tensor, ...]:
            return x.split(cfg.batch_size)

        def split_groups(obs: Observation) -> list[dict[str, Tensor]]:
            return [dict(zip(obs, parts, strict=True)) for parts in zip(*map(split, obs.values()), strict=True)]

        action = drawn.action.long() if self.discrete else drawn.action
        columns = split_groups(obs), split(action), split(reward), split_groups(next_obs), split(drawn.discount)
        rows = zip(*columns, weight.unbind(), split(drawn.index), noise.unbind(), strict=True)
        return [Batch(*row) for row in rows]

    def _draw_batch_noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, generator=self._sample_generator)

    def _look(self, batch: Batch, moves_actor: bool) -> None:
        """Append image features to the `policy` group, with gradients where they train the encoder."""
        policy = self.policy
        assert policy.encoder is not None
        self.replay.with_frames(batch)
        for obs, learns in ((batch.obs, True), (batch.next_obs, False)):
            images = {group: obs.pop(group) for group in policy.encoder.groups}  # freed early
            if learns and not (policy.critic_sees_images or moves_actor):
                continue
            if self._shift:
                images = {g: random_shift(x, self._shift, self._sample_generator) for g, x in images.items()}
            with torch.set_grad_enabled(learns):
                features = policy.encoder(images, reduced=policy.reduced)
            obs["policy"] = torch.cat([obs["policy"], features], dim=-1)

    def _critic_step(self, batch: Batch, limit: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Update critics if norm < limit; return losses and Q values [members, batch], mean target [batch] and norm."""
        each, q, target, expected = self._critic_loss(batch)
        gradients = self.critic_optimizer.gradients(each, batch.weight.expand_as(each))
        if self.policy.critic_sees_images:
            batch.obs["policy"] = batch.obs["policy"].detach()  # the actor does not train the encoder
        norm = self.critic_optimizer.set_gradients(self.collective.sum(gradients))
        self.critic_optimizer.masked_step(norm, limit)
        if self.priorities is not None:
            self.priorities.update(batch.index, self._error(each.detach(), target), batch.weight, ~(norm < limit))
        return each.detach(), q, expected, norm

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return losses and Q values [members, batch], targets and expected returns [batch]."""
        policy, critic = self.policy, self.policy.critic
        group, reduced = policy.critic_group, policy.mlp_reduced
        inputs = batch.obs[group], batch.action
        if reduced and critic.shares_kernels() and type(critic).forward is Critic.forward:
            with torch.no_grad():
                action, bonus = self.next_action(batch)
            outputs, after = critic.with_target(policy.target_critic, inputs, (batch.next_obs[group], action), reduced)
            batch = dataclasses.replace(batch, following=(after, bonus))
        else:
            outputs = critic(*inputs, reduced=reduced)
        with torch.no_grad():
            target, expected = self.targets(batch)
        if critic.support is None:
            each = functional.mse_loss(outputs.squeeze(-1), target.expand(critic.members, -1), reduction="none")
        else:
            each = -(target * outputs.log_softmax(dim=-1)).sum(dim=-1)
        return each, critic.value(outputs.detach()), target, expected

    @torch.no_grad()
    def _critic_numbers(self, steps: list[tuple[Tensor, ...]], weight: Tensor) -> Mapping[str, Tensor]:
        """Return the critics' metrics, averaged over updates and processes; weight: [updates, batch]."""
        each, q, expected, norm = (torch.stack(column) for column in zip(*steps, strict=True))
        per_critic = weight[:, None]
        loss, q = (each * per_critic).sum(dim=(1, 2)), (q * per_critic).sum(dim=2).mean(dim=1)
        expected = (expected * weight).sum(dim=1)
        numbers = torch.stack([*self.collective.sum([loss, q, expected]), norm], dim=1)
        return _means(("loss/critic", "value/q", "value/q_target", "policy/critic_grad_norm"), numbers)

    def _error(self, each: Tensor, target: Tensor) -> Tensor:
        """Return |y - Q| or KL(y || Q), averaged over critics, [batch]."""
        if self.policy.critic.support is None:
            return each.sqrt().mean(dim=0)
        return (each.mean(dim=0) + torch.special.xlogy(target, target).sum(dim=-1)).clamp_(min=0.0)

    def look_ahead(self, batches: Sequence[Batch]) -> None:
        """Prepare the updates until the next step of the actor, inclusive."""

    def next_action(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return actions for `next_obs`, and a bonus added to their value, [batch] or None."""
        raise NotImplementedError

    def _next_outputs(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the target critics' outputs for the next actions, and the bonus."""
        if batch.following is not None:
            return batch.following
        action, bonus = self.next_action(batch)
        policy = self.policy
        return policy.target_critic(batch.next_obs[policy.critic_group], action, reduced=policy.mlp_reduced), bonus

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return targets (Q values [batch] or probabilities [batch, atoms]) and expected returns."""
        outputs, bonus = self._next_outputs(batch)
        critic = self.policy.target_critic
        value = critic.value(outputs)
        if critic.support is None:
            value = self._reduce(value)
            value = value if bonus is None else value + bonus
            target = torch.addcmul(batch.reward, batch.discount, value)
            return target, target
        probabilities = outputs.softmax(dim=-1)
        if self.cfg.clipped:  # use the distribution with the lower mean
            lowest = value.argmin(dim=0)[None, :, None].expand(1, -1, probabilities.shape[-1])
            probabilities = probabilities.gather(0, lowest)[0]
        else:
            probabilities = probabilities.mean(dim=0)
        atoms = critic.support if bonus is None else critic.support + bonus[:, None]
        returns = batch.reward[:, None] + batch.discount[:, None] * atoms
        target = project(probabilities, returns, critic.support)
        return target, target @ critic.support

    def q_value(self, batch: Batch, action: Tensor) -> Tensor:
        """Return the Q values that the actor maximises, [batch]."""
        critic, policy = self.policy.critic, self.policy
        outputs = critic(batch.obs[policy.critic_group], action, reduced=policy.mlp_reduced, learns=False)
        return self._reduce(critic.value(outputs))

    def _reduce(self, value: Tensor) -> Tensor:
        if self.policy.critic.members == 1:
            return value[0]
        return value.min(dim=0).values if self.cfg.clipped else value.mean(dim=0)

    def actor_loss(self, batch: Batch) -> list[Tensor]:
        """Return the values named by `actor_losses`."""
        raise NotImplementedError

    def _imitation(self, batch: Batch, action: Tensor, q: Tensor) -> Tensor:
        """Return the squared distance to demonstrations, times mean |Q| (Fujimoto and Gu 2021, arXiv 2106.06860)."""
        distance = (action - batch.action)[-self._num_shown :].square().sum(dim=-1)
        counts = batch.weight[-self._num_shown :]
        mean = distance @ (counts / counts.sum().clamp(min=torch.finfo(torch.float32).tiny))
        return self.cfg.demonstrations.imitation / self.collective.size * q.detach().abs().mean() * mean

    def _actor_step(self, batch: Batch, limit: Tensor) -> tuple[Tensor, ...]:
        """Update the actor if norm < limit; return its all-reduced losses and gradient norm."""
        assert self.actor_optimizer is not None
        numbers = self._actor_loss(batch)
        gradients = self.actor_optimizer.gradients(numbers[0])
        sums = self.collective.sum([*(number.detach() for number in numbers), *gradients])
        norm = self.actor_optimizer.set_gradients(sums[len(numbers) :])
        self.actor_optimizer.masked_step(norm, limit)
        return *sums[: len(numbers)], norm

    def _actor_numbers(self, steps: list[tuple[Tensor, ...]]) -> Mapping[str, Tensor]:
        if not steps:
            return {}
        numbers = torch.stack([torch.stack(column) for column in zip(*steps, strict=True)], dim=1)
        return _means((*self.actor_losses, "policy/grad_norm"), numbers)

    @torch.no_grad()
    def _look_at_new_frames(self) -> dict[str, Tensor]:
        """Update observation statistics; return sums of observations and rewards, for the finite check."""
        obs, valid, reward = self.replay.latest(self.horizon)
        for group, norm in self.policy.obs_norm.items():
            norm.update(obs[group].flatten(0, 1), valid.flatten(), self.collective)  # type: ignore[operator]
        return {"check/obs": torch.stack([x.sum() for x in obs.values()]).sum(), "check/reward": reward.sum()}

    def describe(self) -> dict[str, str]:
        """Describe networks, updates and replay buffer."""
        cfg, net, envs = self.cfg, self.cfg.network, self.num_envs

        def layers(sizes: list[int]) -> str:
            return net._target_ or f"{'x'.join(map(str, sizes))} {net.activation}"

        encoder = self.policy.encoder
        images = "" if encoder is None else f"{net.encoder.describe()}, "
        actor = "" if self.policy.actor is None else f"actor {layers(net.hidden)}, "
        atoms = "" if net.atoms is None else f" of {net.atoms} atoms"
        critics = f"{net.critics} critic{'s' if net.critics > 1 else ''}{atoms} {layers(net.critic_hidden)}"
        number = sum(p.numel() for p in (*self._online, *(encoder.parameters() if encoder else ())))
        samples = f"{cfg.horizon * cfg.updates} updates of {cfg.batch_size} for {envs} x {cfg.horizon}"
        return {
            "network": f"{images}{actor}{critics}, {number:,} parameters",
            "batch": f"{samples} = {envs * cfg.horizon} samples;"
            f" {describe_replay(cfg, self.replay, self.section, self._max_steps)}",
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the training state, including the replay buffer if `replay.save` is set."""
        save = self.cfg.replay.save
        return {
            "critic_optimizer": self.critic_optimizer.moments(),
            "actor_optimizer": None if self.actor_optimizer is None else self.actor_optimizer.moments(),
            "steps": self.steps.clone(),
            "skipped": self.skipped.clone(),
            "act_generator": self._act_generator.get_state(),
            "sample_generator": self._sample_generator.get_state(),
            "time_limit": self._time_limit,
            "replay": self.replay.state_dict() if save else None,
            "priorities": self.priorities.state_dict() if save and self.priorities is not None else None,
            "demonstrations": self._digest,
            "episodes": {"noise": self.noise.state_dict(), "frames": [frames.clone() for frames in self.hidden]},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; the replay buffer starts empty if it was not saved or the time limit changed."""
        self.critic_optimizer.load_moments(state["critic_optimizer"])
        if self.actor_optimizer is not None:
            self.actor_optimizer.load_moments(state["actor_optimizer"])
        self.steps.copy_(state["steps"])
        self.skipped.copy_(state["skipped"])
        restore_generator(self._act_generator, state["act_generator"])
        restore_generator(self._sample_generator, state["sample_generator"])
        self.replay.clear()
        if self.priorities is not None:
            self.priorities.clear()
        before, now = state["time_limit"], self._time_limit
        if state["replay"] is not None and before == now:
            self.replay.load_state_dict(state["replay"])
            if self.priorities is not None:
                self.priorities.load_state_dict(state["priorities"])
        elif state["replay"] is not None:  # the time limit determines the rows of final observations
            warn(f"the time limit changed from {before} to {now} control steps; refilling the replay buffer")
        if state["demonstrations"] != self._digest:
            warn("the demonstrations differ from those used before the resume")
        if state["episodes"] is None:
            self.begin_episodes()
        else:
            self.noise.load_state_dict(state["episodes"]["noise"])
            for frames, saved in zip(self.hidden, state["episodes"].get("frames", ()), strict=True):
                frames.copy_(saved)


def _means(names: Sequence[str], numbers: Tensor) -> dict[str, Tensor]:
    """Average each column over updates; updates with a non-finite gradient, the last column, count as 0."""
    bad = ~(numbers[:, -1] < torch.inf)
    return dict(zip(names, numbers.masked_fill_(bad[:, None], 0.0).mean(dim=0).unbind(), strict=True))
