"""Interface between trainer and algorithm.

A yaml in cfg/algo or a user's folder (`-cd`) registers the class `algo._target_`. Built-in algorithms are also listed
in `settings/schema.py`, which checks their settings before torch is imported.
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
"""Tensors by group: `policy`, optional `critic`, [num_envs, size]; images uint8 [num_envs, height, width, channels]."""

Hidden = tuple[Tensor, ...]
"""Recurrent state: tensors [layers, batch, size]; empty for feed-forward policies."""


@dataclass(frozen=True, slots=True)
class TrainedPolicy:
    """Policy of another run."""

    policy: Policy
    settings: Any  # settings of the algorithm
    obs_sizes: Mapping[str, int]  # size of each observation group
    digest: str  # digest of the checkpoint


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Static description of the envs."""

    num_envs: int
    obs_sizes: Mapping[str, int]
    """Size of each numeric observation group."""
    action_space: ActionSpace
    max_episode_length: int
    """Time limit [control steps]."""
    dt: float = 1.0
    """Duration of a control step [s]; 1 if unknown."""
    task: str = ""
    """Class name of the task; empty if unknown."""
    obs_names: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)
    """Names of the columns of observation groups, if known."""
    images: Mapping[str, ImageShape] = field(default_factory=dict)
    """Shape of each image group."""
    final_images: bool = False
    """True if `final_obs` holds images."""
    mirrored: Callable[[], tuple[Mapping[str, SignedPermutation], float]] | None = field(default=None, compare=False)
    """Function that returns mirror maps by group and the asymmetry (`gpusim_rl.env.mirrors`), or raises TaskError."""


class ActorPlace(NamedTuple):
    """Position of an actor's envs among all envs of its learner."""

    first_env: int
    all_envs: int


@dataclass(frozen=True, slots=True)
class LearnerContext:
    """Run-time context of an algorithm."""

    section: str = "algorithm"  # settings section, for error messages
    collective: Collective = ALONE  # processes that learn together and all-reduce sums over samples
    compile: bool = False  # whether to compile the update, if supported
    load_policy: Callable[[str], TrainedPolicy] | None = None  # loads another run's policy
    actor: ActorPlace | None = None  # position of this actor's envs; None in a learner


DEFAULT_CONTEXT = LearnerContext()


class Outcome(Protocol):
    """Part of a `Transition` that a replay buffer stores."""

    final_obs: dict[str, Tensor]  # observations after the step, before any reset
    reward: Float[Tensor, " envs"]
    terminated: Bool[Tensor, " envs"]  # the task ended the episode: no bootstrap
    truncated: Bool[Tensor, " envs"]  # the time limit ended the episode: bootstrap with V(final_obs)
    diverged: Bool[Tensor, " envs"]  # the simulation failed: the sample is invalid


class Transition(Outcome, Protocol):
    """Result of a control step in all envs (`gpusim_rl.env.Step`)."""

    obs: dict[str, Tensor]  # observations for the next action; after `done`, the first of the new episode
    done: Bool[Tensor, " envs"]  # terminated | truncated | diverged: `obs` begins an episode


class RecordedTensor(NamedTuple):
    """Labelled tensor from the task, for error messages."""

    name: str  # noun with article: `an observation`
    value: Tensor
    axes: tuple[str, ...]
    """Names of the dimensions (step, env, column), or "" for internal dimensions."""
    group: str = ""


@runtime_checkable
class Recorder(Protocol):
    """Attribute of an algorithm that keeps recent steps, so that they can be searched for non-finite values."""

    def recorded(self, steps: int) -> list[RecordedTensor]:
        """Return observations and rewards of the last `steps` control steps."""
        ...


def recorded_steps(obs: Mapping[str, Tensor], reward: Tensor) -> list[RecordedTensor]:
    """Label observations [steps, envs, size] and rewards [steps, envs] for error messages."""
    observations = [RecordedTensor("an observation", x, ("step", "env", "column"), g) for g, x in obs.items()]
    return [*observations, RecordedTensor("a reward", reward, ("step", "env"))]


PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}  # autocast dtypes by setting; None: float32


class Policy(nn.Module):
    """Acting part of an algorithm; also used for evaluation, playing and export."""

    reduced: torch.dtype | None = None  # 16-bit number format of the networks (autocast); None: float32

    @property
    def precision(self) -> str:
        """Name of the number format, as in the setting `precision`."""
        return next(name for name, dtype in PRECISIONS.items() if dtype is self.reduced)

    @property
    def mlp_reduced(self) -> torch.dtype | None:
        """`reduced` for MLPs: None after an image encoder, as 16-bit rounding would hide small position changes."""
        return self.reduced if getattr(self, "encoder", None) is None else None

    @abstractmethod
    def act(self, obs: Observation, hidden: Hidden, deterministic: bool = True) -> tuple[Tensor, Hidden]:
        """Return actions, most likely or sampled, for raw observations [batch, size], and the next recurrent state."""

    def initial_state(self, batch: int) -> Hidden:
        """Return the recurrent state at the start of an episode: zeros."""
        return ()

    def actor_state(self, batch: int) -> Hidden:
        """Return `initial_state` without the critic's part."""
        return self.initial_state(batch)

    def act_without_critic(self, obs: Observation, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """Return the most likely actions and the next `actor_state`, for export.

        Override it if `act` needs groups other than `policy` and images.
        """
        return self.act(obs, hidden)


class Algorithm(ABC):
    """Learning algorithm: chooses actions, stores the results and learns from them.

    The trainer repeats: `begin_rollout`; `horizon` times `act`, a control step, `record`; then `before_update` and
    `update`. CUDA graphs capture rollout and update, so memory is allocated in `__init__` and written in place, masks
    replace index lists, the host never reads tensors, and every changing value is a tensor (docs/architecture.md).

    Args:
        cfg: Instance of `Config`.
        env: Description of the envs.
        context: See `LearnerContext`.
        device: Device of networks and memory.
        seed: Seed of all random numbers.
        max_iterations: Total number of updates, for schedules.
    """

    Config: ClassVar[type]
    """Frozen dataclass of the yaml section, optionally a subclass of `AlgorithmConfig`."""

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
        """Build a policy with random weights; the default builds a whole algorithm and returns its policy."""
        return cls(cfg, env, context, device=device, seed=0, max_iterations=1).policy

    def begin_rollout(self) -> None:  # noqa: B027 (optional)
        """Do work shared by the next `horizon` steps, such as drawing noise."""

    @abstractmethod
    def act(self, obs: Observation) -> Tensor:
        """Return exploratory actions [num_envs, actions], valid until `record` returns."""

    @abstractmethod
    def record(self, action: Tensor, step: Transition) -> None:
        """Copy actions and results into preallocated memory; the next step overwrites the arguments."""

    def before_update(self) -> None:  # noqa: B027 (optional)
        """Do work that a CUDA graph cannot capture, such as waiting for a thread."""

    @abstractmethod
    def update(self) -> dict[str, Tensor]:
        """Learn from the recorded steps; return metrics `<group>/<name>`, 0-dim device tensors.

        A non-finite `check/` or `loss/` value ends the run; `check/` is not logged. `check/learned` is 0 if no gradient
        was finite, else 1; repeated zeros restore the last checkpoint, then stop the run.
        """

    def describe(self) -> dict[str, str]:
        """Return banner lines by label, such as `network` and `batch`."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return all state except the policy: tensors, numbers, strings, lists and dicts.

        State of unfinished episodes goes into the `episodes` entry.
        """

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict` in place; if `episodes` is None, all envs begin new episodes."""


def make_policy(
    algorithm_class: type[Algorithm],
    cfg: RunConfig,
    obs_sizes: Mapping[str, int],
    action_space: ActionSpace,
    device: torch.device,
    images: Mapping[str, ImageShape] = MappingProxyType({}),
) -> Policy:
    """Build a policy for a checkpoint, in float32, so that actions do not depend on the machine."""
    env = EnvSpec(1, obs_sizes, action_space, max_episode_length=1, images=images)
    policy = algorithm_class.make_policy(cfg.algorithm, env, LearnerContext(cfg.algo), device)
    policy.reduced = None
    return policy


def choose_precision(precision: str, device: torch.device) -> tuple[str, str]:
    """Return the number format of networks (a key of `PRECISIONS`) and the reason."""
    if precision != "auto":
        return precision, "as configured"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found = "bf16" if major >= 8 else "fp16" if major == 7 else "fp32"
        return found, f"auto: compute capability {major}.{minor}"
    if device.type == "cpu":
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return "bf16" if fast else "fp32", f"auto: the CPU {'has' if fast else 'has no'} bf16 matrix instructions"
    return "fp32", f"auto: {device.type}"


def make_generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a seeded random generator on the device; on the CPU for "meta"."""
    return torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)


def restore_generator(generator: torch.Generator, state: Tensor) -> None:
    """Restore a generator's state, unless it comes from another device type: CPU and CUDA states differ in size."""
    if state.shape == generator.get_state().shape:
        generator.set_state(state.cpu())


def load_algorithm_class(target: Any) -> type[Algorithm]:
    """Import the `Algorithm` subclass named by `algo._target_`; raise ConfigError if there is none."""
    return load_class(target, Algorithm, "algo._target_", "gpusim_rl.learn.ppo.PPO")
