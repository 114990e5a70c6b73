"""The interface between a training and an algorithm: `Algorithm`.

A trainer collects and updates. An algorithm chooses actions and learns from the results. Every algorithm works with
every task, CUDA graphs, exact resume, logging, playing and recording.

A yaml in cfg/algo, or in a user's folder (`-cd`), registers one: its `algo._target_` names the class. Ours stand in
`settings/schema.py` too, because their settings are checked before torch is imported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gpusim_rl.learn.collective import ALONE, Collective
from gpusim_rl.settings.load_class import load_class
from gpusim_rl.settings.schema import RunConfig
from gpusim_rl.spaces import ActionSpace, ImageShape, SignedPermutation

Observation = Mapping[str, Tensor]
"""Observation groups by name: `policy`, and `critic` where the task has one, [num_envs, size]; and groups of images,
uint8 [num_envs, height, width, channels]."""

Hidden = tuple[Tensor, ...]
"""Recurrent state, [layers, batch, size] each; empty for feed-forward policies."""


@dataclass(frozen=True, slots=True)
class TrainedPolicy:
    """The policy of another run."""

    policy: Policy
    settings: Any
    """Settings of the algorithm that trained it."""
    obs_sizes: Mapping[str, int]
    """Size of each observation group of its envs."""
    digest: str
    """Digest of its checkpoint."""


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Description of the environments, for an algorithm that is made before they run."""

    num_envs: int
    obs_sizes: Mapping[str, int]
    """Size of each observation group of numbers."""
    action_space: ActionSpace
    max_episode_length: int
    """Time limit: an env is truncated at most once in so many control steps."""
    dt: float = 1.0
    """Control step [s]; 1 where it is not known."""
    task: str = ""
    """Name of the task's class; empty where it is not known."""
    obs_names: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)
    """Names of the numbers of an observation group; none where they are not known."""
    images: Mapping[str, ImageShape] = field(default_factory=dict)
    """Shape of each observation group of images."""
    final_images: bool = False
    """Whether `final_obs` has images of the last state of an episode."""
    mirrored: Callable[[], tuple[Mapping[str, SignedPermutation], float]] | None = field(default=None, compare=False)
    """Returns the mirror images of the observation groups and of `actions`, by name, and how far the robot is from its
    own (`gpusim_rl.env.mirrors`). It raises TaskError where there are none."""


class ActorPlace(NamedTuple):
    """Place of an actor's envs among those of all actors of a learner."""

    first_env: int
    all_envs: int


@dataclass(frozen=True, slots=True)
class LearnerContext:
    """Surroundings of an algorithm: all that it is given besides its settings and the description of the envs.

    Attributes:
        section: Section of the settings, `algo.name` of the run; messages name settings by it.
        collective: Processes that learn together; sums over samples are taken over all of them.
        compile: Whether torch.compile is to make the update faster, where the algorithm can use it.
        load_policy: Function that loads the policy of another run, by the run's name, onto the algorithm's device: for
            teachers and warm starts.
        actor: Place of an actor, which records rollouts for a learner elsewhere and needs no memory to learn from;
            None in a process that learns.
    """

    section: str = "algorithm"
    collective: Collective = ALONE
    compile: bool = False
    load_policy: Callable[[str], TrainedPolicy] | None = None
    actor: ActorPlace | None = None


DEFAULT_CONTEXT = LearnerContext()
"""Surroundings of an algorithm that learns alone."""


class Outcome(Protocol):
    """The part of a `Transition` that a replay memory stores."""

    final_obs: dict[str, Tensor]
    """Observations after the step, before any reset."""
    reward: Float[Tensor, " envs"]
    terminated: Bool[Tensor, " envs"]
    """Whether the episode ended by the task's rules: no bootstrap, the future is worth 0."""
    truncated: Bool[Tensor, " envs"]
    """Whether the time limit ended the episode: bootstrap with V(final_obs)."""
    diverged: Bool[Tensor, " envs"]
    """Whether the simulation failed: the sample must not be learned from."""


class Transition(Outcome, Protocol):
    """The result of a control step in all environments: `gpusim_rl.env.Step`."""

    obs: dict[str, Tensor]
    """Observations to act on next: where an episode ended, of the next one."""
    done: Bool[Tensor, " envs"]
    """Whether any of the three holds: a new episode begins with `obs`."""


class RecordedTensor(NamedTuple):
    """A tensor from the task that a memory holds, as errors name it."""

    name: str
    """Name in words: `an observation`."""
    value: Tensor
    axes: tuple[str, ...]
    """Names of the dimensions: step, env, column; empty for one that a user cannot name."""
    group: str = ""
    """Observation group."""


@runtime_checkable
class Recorder(Protocol):
    """A memory, an attribute of an algorithm, that can be searched for what is not finite."""

    def recorded(self, steps: int) -> list[RecordedTensor]:
        """Returns observations and rewards of the newest control steps."""
        ...


def recorded_steps(obs: Mapping[str, Tensor], reward: Tensor) -> list[RecordedTensor]:
    """Names observations [steps, envs, size] by group, and rewards [steps, envs]."""
    observations = [RecordedTensor("an observation", x, ("step", "env", "column"), g) for g, x in obs.items()]
    return [*observations, RecordedTensor("a reward", reward, ("step", "env"))]


class Policy(nn.Module):
    """The part of an algorithm that acts. Evaluation, playing and export need nothing else of it."""

    bf16: bool = False
    """Whether the networks run in bfloat16, where their class has that choice."""

    @property
    def mlp_bf16(self) -> bool:
        """Whether perceptrons do too: not behind an encoder, where a velocity is a small difference of positions."""
        return self.bf16 and getattr(self, "encoder", None) is None

    @abstractmethod
    def act(self, obs: Observation, hidden: Hidden, deterministic: bool = True) -> tuple[Tensor, Hidden]:
        """Returns actions [batch, actions] for raw observations [batch, size], and the next recurrent state."""

    def initial_state(self, batch: int) -> Hidden:
        """Returns the recurrent state at the start of an episode: zeros; empty for feed-forward policies."""
        return ()

    def actor_state(self, batch: int) -> Hidden:
        """Returns the part of `initial_state` that actions depend on: without that of a critic."""
        return self.initial_state(batch)

    def act_without_critic(self, obs: Observation, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """Returns the most likely actions for raw observations, and the next `actor_state`.

        The observations are the group `policy`, and the groups of images. Export traces it. A policy whose `act` needs
        other groups, or computes more than actions, has its own.
        """
        return self.act(obs, hidden)


class Algorithm(ABC):
    """Chooses actions and learns from the results; owns its memory (a rollout, a replay buffer).

    The trainer repeats: `begin_rollout`; `horizon` times `act`, a control step, `record`; then `before_update` and
    `update`. On CUDA the rollout and the update are captured into graphs and replayed without Python. So an algorithm
    follows the rules for code that runs in every step (docs/architecture.md): memory is made in `__init__` and written
    in place, masks replace index lists, no value of a tensor is read on the host, and what changes during a training is
    a tensor.

    Args:
        cfg: Settings: an instance of `Config`.
        env: Environments.
        context: Surroundings: processes that learn together, other runs' policies.
        device: Device of networks and memory.
        seed: Seed of all random numbers of the algorithm.
        max_iterations: Updates in a whole training, for schedules.

    Attributes:
        horizon: Control steps per iteration.
        policy: Policy that is trained.
    """

    Config: ClassVar[type]
    """A frozen dataclass of settings, whose values are in the yaml's section: an `AlgorithmConfig`, or a plain one."""

    horizon: int
    policy: Policy

    @abstractmethod
    def __init__(
        self,
        cfg: Any,
        env: EnvSpec,
        context: LearnerContext = DEFAULT_CONTEXT,
        *,
        device: torch.device,
        seed: int,
        max_iterations: int,
    ) -> None: ...

    @classmethod
    def make_policy(cls, cfg: Any, env: EnvSpec, context: LearnerContext, device: torch.device) -> Policy:
        """Makes the policy alone, with random weights, for evaluation, playing and export.

        Here it is taken from a whole algorithm. Ours make networks and nothing else.
        """
        return cls(cfg, env, context, device=device, seed=0, max_iterations=1).policy

    def begin_rollout(self) -> None:  # noqa: B027 (optional)
        """Does once what the next `horizon` steps share, such as drawing their noise."""

    @abstractmethod
    def act(self, obs: Observation) -> Tensor:
        """Returns actions [num_envs, actions] that explore, for raw observations, overwritten after `record`.

        Keeps what `record` will need, such as log-probabilities.
        """

    @abstractmethod
    def record(self, action: Tensor, step: Transition) -> None:
        """Writes the actions of `act` and their result into fixed memory; the next step overwrites its tensors."""

    def before_update(self) -> None:  # noqa: B027 (optional)
        """Does between rollout and update what no CUDA graph can hold, such as waiting for a thread."""

    @abstractmethod
    def update(self) -> dict[str, Tensor]:
        """Learns from what was recorded: one iteration.

        Returns:
            Numbers for the log, as 0-dim device tensors. A name is `<group>/<name>`. One that begins with `check/` or
            `loss/` ends the run when it is not finite (NaN); `check/` is not logged. `check/learned` is 0 where the
            update left the policy as it was, because no gradient was finite, else 1: an algorithm that does not learn
            for some iterations is put back to the last checkpoint, then stopped.
        """

    def describe(self) -> dict[str, str]:
        """Returns lines for the start of a run, by label: network, batch."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns all that the next iteration depends on, except the policy: optimiser, random generators.

        Tensors, numbers, strings, lists and dicts only: a checkpoint holds data, not objects. What belongs to the
        episodes that the envs are in, such as recurrent state, is the entry `episodes`.
        """

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`, in place. Where the entry `episodes` is None, all envs begin new episodes."""


def make_policy(
    algorithm_class: type[Algorithm],
    cfg: RunConfig,
    obs_sizes: Mapping[str, int],
    action_space: ActionSpace,
    device: torch.device,
    images: Mapping[str, ImageShape] = MappingProxyType({}),
) -> Policy:
    """Makes a policy for the weights of a checkpoint.

    It is float32, whatever it is trained in, so that its actions depend on no machine.
    """
    env = EnvSpec(1, obs_sizes, action_space, max_episode_length=1, images=images)
    policy = algorithm_class.make_policy(cfg.algorithm, env, LearnerContext(cfg.algo), device)
    policy.bf16 = False
    return policy


def make_generator(device: torch.device, seed: int) -> torch.Generator:
    """Makes a seeded random generator; on "meta", where nothing is drawn, one of the CPU."""
    return torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)


def restore_generator(generator: torch.Generator, state: Tensor) -> None:
    """Continues a stream of random numbers, if it is of the same kind of device: CPU and CUDA have different ones."""
    if state.shape == generator.get_state().shape:
        generator.set_state(state.cpu())


def load_algorithm_class(target: Any) -> type[Algorithm]:
    """Imports the `Algorithm` subclass that `algo._target_` names, e.g. `gpusim_rl.learn.ppo.PPO`.

    Raises:
        ConfigError: There is no such class, or it is no Algorithm.
    """
    return load_class(target, Algorithm, "algo._target_", "gpusim_rl.learn.ppo.PPO")
