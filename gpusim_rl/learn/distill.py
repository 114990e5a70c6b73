"""Policy distillation: a student learns to act as a trained policy does (Rusu et al. 2016, arXiv 1511.06295)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.minibatch import Samples, Sequences, fit_sequence_length
from gpusim_rl.learn.networks import ActorCritic
from gpusim_rl.learn.on_policy import OnPolicy
from gpusim_rl.learn.teacher import IMITATION, LABEL, Teacher
from gpusim_rl.settings.schema import DistillConfig

DISTANCES = {"mse": functional.mse_loss, "huber": functional.huber_loss}


class Distill(OnPolicy):
    """Learns the mean actions of a teacher in the states that the student comes to (DAgger, Ross et al. 2011).

    The student acts and explores; the teacher only says what it would do (arXiv 1011.0686, with beta = 0). The loss is
    the distance of the student's mean from the teacher's. A recurrent state is followed back over `sequence_length`
    control steps. Each step of the optimiser takes as many samples as so many steps of all envs have, of all times of
    the rollout: at one time all envs may need the same, and a student would learn nothing else. Rewards are not used,
    and there is no value function.
    """

    Config = DistillConfig
    losses = (IMITATION,)

    cfg: DistillConfig

    def __init__(
        self, cfg: DistillConfig, env: EnvSpec, *, device: torch.device, seed: int, max_iterations: int
    ) -> None:
        if env.role != "acts":
            self.teacher = Teacher(env, f"{env.section}.teacher", cfg.teacher, cfg.horizon, device)
        student = dataclasses.replace(env, obs_sizes={"policy": env.obs_sizes["policy"]})
        super().__init__(cfg, student, device=device, seed=seed, max_iterations=max_iterations)

    def make_policy(self, env: EnvSpec) -> ActorCritic:
        policy = super().make_policy(env)
        for name, parameter in policy.named_parameters():
            if name.startswith(("value_head", "head.log_std")):
                parameter.requires_grad_(False)
        return policy

    def loss_weights(self) -> dict[str, float]:
        return {name: 1.0 for name in self.losses}

    @torch.no_grad()
    def _prepare(self) -> tuple[Sequences, dict[str, Tensor]]:
        assert self.teacher is not None
        rollout, valid = self.rollout, self.rollout.valid.float()
        nothing = dict.fromkeys(("advantage", "value", "target"), torch.zeros_like(valid))
        samples = Samples.of(rollout.action, rollout.distribution, nothing["value"], **nothing, valid=valid, clip=0.0)
        inputs = {**self._inputs(), LABEL: self.teacher.actions}
        return Sequences.of(rollout, inputs, samples.pack()), {"check/obs": rollout.obs["policy"].sum()}

    def _learn(self, batch: Sequences) -> list[tuple[Tensor, Tensor]]:
        weight, steps = Samples.weight_of(batch.packed), []
        valid = weight.clone()
        for _ in range(self.cfg.epochs):
            for index in self._shuffle(weight, valid):
                losses, norm, skip = self._gradient(batch, index)
                self._step(norm, skip)
                steps.append((losses, norm))
        return steps

    def _evaluate(self, old: Samples, inputs: dict[str, Tensor], *state: Any) -> dict[str, Tensor]:
        mean = self.policy(inputs, *state)[0].mode
        return {IMITATION: DISTANCES[self.cfg.loss](mean, inputs[LABEL], reduction="none").mean(dim=-1)}

    def _fit_minibatches(self, samples: int) -> int:
        return self.horizon // fit_sequence_length(self.horizon, self.cfg.sequence_length)

    def _describe_steps(self) -> str:
        length = self._fitted("sequence_length", self.horizon // self.num_minibatches)
        return f"in {self.num_minibatches} x {length} control steps, {self.cfg.epochs} epochs"

    def describe(self) -> dict[str, str]:
        """Returns network, batch and teacher."""
        name, teacher = self.cfg.teacher, self.teacher
        return super().describe() | ({"teacher": f"{name}, observes {teacher.group}"} if teacher is not None else {})
