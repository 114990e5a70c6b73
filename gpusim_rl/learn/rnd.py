"""Random network distillation: an intrinsic reward for novel states (Burda et al. 2018, arXiv 1810.12894)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gpusim_rl.errors import ConfigError, did_you_mean, warn
from gpusim_rl.learn.algorithm import EnvSpec, LearnerContext
from gpusim_rl.learn.distributions import squared_distance
from gpusim_rl.learn.extensions import Extension
from gpusim_rl.learn.minibatch import by_sequence
from gpusim_rl.learn.networks import MLP, ActorCritic
from gpusim_rl.learn.normalize import RunningNormalizer
from gpusim_rl.learn.optimizer import MaskedAdamW
from gpusim_rl.learn.rollout import Rollout
from gpusim_rl.settings.schema import PPOConfig

DISCOUNT = 0.99  # of the intrinsic return; `normalize` divides rewards by the return's standard deviation


class RandomDistillation(Extension):
    """Intrinsic reward: a predictor's error on a fixed random network's features, times weight and control step [s].

    Both networks see the observation after the step; where an episode ended, the first one of the new episode.
    """

    def __init__(self, cfg: PPOConfig, env: EnvSpec, context: LearnerContext, device: torch.device) -> None:
        rnd, self._reward_scale = cfg.rnd, cfg.reward_scale
        sizes = {name: size for name, size in env.obs_sizes.items() if size}
        self._cfg, self._dt, self._collective = rnd, env.dt, context.collective
        self.group = rnd.group or ("critic" if "critic" in env.obs_sizes else "policy")
        if self.group not in sizes:
            groups = f"an observation group ({', '.join(sizes) or 'none, only images'})"
            hint = did_you_mean(self.group, sizes)
            raise ConfigError(key=f"{context.section}.rnd.group", expected=groups, got=self.group, hint=hint)
        size = sizes[self.group]
        with device:
            pair = [nn.Sequential(net := MLP(size, rnd), nn.Linear(net.out_size, rnd.outputs)) for _ in range(2)]
            self.seen, self.sums = RunningNormalizer(size, clip=cfg.clip_obs), RunningNormalizer(1)
        self.target, self.predictor = pair[0].requires_grad_(False), pair[1]
        for net in pair if context.collective.size > 1 else []:
            net.load_state_dict(context.collective.share({name: x.cpu() for name, x in net.state_dict().items()}))
        self.optimizer = MaskedAdamW([*self.predictor.parameters()], rnd.learning_rate)
        self.steps = torch.zeros((), dtype=torch.int64, device=device)  # control steps since training began
        self.discounted = torch.zeros(env.num_envs, device=device)  # discounted reward sum per env
        self.mean = torch.zeros((), device=device)  # mean intrinsic reward per step
        self._time = torch.arange(cfg.horizon, device=device)
        self._states: Tensor | None = None
        self._rollout: Rollout | None = None

    def _next(self, rollout: Rollout) -> Float[Tensor, "time envs size"]:
        return torch.cat([rollout.obs[self.group][1:], rollout.last_obs[self.group][None]])

    def weights_of_steps(self) -> Float[Tensor, " time"]:
        """Return the scheduled weight of each step of the rollout [1/s]."""
        cfg, now = self._cfg, self.steps + self._time
        share = {
            "constant": torch.zeros_like(now),
            "step": now >= cfg.end,
            "linear": ((now - cfg.begin) / max(1, cfg.end - cfg.begin)).clamp(0.0, 1.0),
        }[cfg.schedule]
        return cfg.weight + (cfg.final_weight - cfg.weight) * share.float()

    def begin_update(self, rollout: Rollout, reward: Tensor, inputs: dict[str, Tensor], policy: ActorCritic) -> Tensor:
        """Add the intrinsic rewards; `after_minibatch` then learns from the same states."""
        self._rollout, states = rollout, self.seen(self._next(rollout))
        self._states = by_sequence(states, rollout.sequence_length)
        distance = torch.linalg.vector_norm(self.predictor(states) - self.target(states), dim=-1)
        if self._cfg.normalize:
            sums = [self.discounted.mul_(DISCOUNT).add_(row).clone() for row in distance]
            self.sums.update(torch.stack(sums).flatten()[:, None], rollout.valid.flatten(), self._collective)
            distance = distance / self.sums.scale
        new = distance * (self.weights_of_steps() * self._dt)[:, None]
        self.steps += len(new)
        self.mean.copy_(new.mean())
        return reward + new * self._reward_scale

    def after_minibatch(self, index: Tensor, weight: Tensor, last: bool) -> dict[str, Tensor]:
        """Train the predictor; after the last minibatch, update the state statistics."""
        assert self._states is not None and self._rollout is not None, "begin_update() comes first"
        states = self._states.index_select(1, index)
        error = squared_distance(self.predictor(states), self.target(states)).mean(dim=-1)
        loss = (error * weight.index_select(1, index)).sum()
        gradients = self.optimizer.gradients(loss)
        loss, *gradients = self._collective.sum([loss.detach(), *gradients])
        self.optimizer.masked_step(self.optimizer.set_gradients(gradients))
        if not last:
            return {}
        rollout, self._states, self._rollout = self._rollout, None, None
        self.seen.update(self._next(rollout).flatten(0, 1), rollout.valid.flatten(), self._collective)
        return {"loss/rnd": loss, "rnd/reward": self.mean.clone()}

    def describe(self) -> dict[str, str]:
        """Return the banner line: group, weight and schedule."""
        cfg = self._cfg
        course = "" if cfg.schedule == "constant" else f", {cfg.schedule} to {cfg.final_weight:g} at step {cfg.end}"
        return {"rnd": f"novelty of {self.group} observations, weight {cfg.weight:g}/s{course}"}

    def state_dict(self) -> dict[str, Any]:
        """Return networks, optimiser, statistics and counters."""
        modules = {name: getattr(self, name).state_dict() for name in ("target", "predictor", "seen", "sums")}
        numbers = {name: getattr(self, name).clone() for name in ("steps", "discounted")}
        return {**modules, **numbers, "optimizer": self.optimizer.moments()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; if network sizes changed, start from scratch."""
        before, now = ({k: x.shape for k, x in net.items()} for net in (state["target"], self.target.state_dict()))
        if before != now:
            warn("rnd: network sizes changed; starting from scratch")
            return
        for name in ("target", "predictor", "seen", "sums"):
            getattr(self, name).load_state_dict(state[name])
        for name in ("steps", "discounted"):
            getattr(self, name).copy_(state[name])
        self.optimizer.load_moments(state["optimizer"])
