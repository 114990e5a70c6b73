"""Every setting has a name, a type, a unit and a rule here; its value is in cfg/*.yaml. Free of torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from gpusim_rl.errors import ConfigError
from gpusim_rl.files.paths import Checkpoint
from gpusim_rl.settings.simulators import SIMULATORS

if TYPE_CHECKING:
    from pathlib import Path

    from gpusim_rl.learn.algorithm import Algorithm

    SimName = str  # a type checker does not see the registry
else:
    SimName = Literal[("auto", *SIMULATORS)]

T = TypeVar("T")

TASK_DEFAULTS = ("randomize", "randomization_params", "reset_from", "observations")
"""Keys of the `task` section that have a default in cfg/config.yaml: all others stand in the task's own yaml."""
OPEN_SECTIONS = ("task.randomization_params", "task.observations", "env.kwargs")
"""Their keys are names of the task's own things: a command line may add some (see gpusim_rl/env/randomize.py)."""


@dataclass(frozen=True)
class Rule:
    """What a value must satisfy, in words and as a test.

    For example `Annotated[int, Rule("a positive int", lambda value: value > 0)]`.
    """

    words: str
    test: Callable[[Any], bool]


LARGEST_COUNT = 2**31 - 1
"""Simulators count in 32 bits."""
LARGEST_INT = 2**63 - 1
"""Of a tensor."""
LARGEST_FLOAT = 1e18
"""The product of two fits a float32: torch refuses a number that does not."""

Count = Annotated[int, Rule("a positive int", lambda value: 0 < value <= LARGEST_COUNT)]
Positive = Annotated[float, Rule("a positive number", lambda value: value > 0)]
NotNegative = Annotated[float, Rule("a number >= 0", lambda value: value >= 0)]
Fraction = Annotated[float, Rule("a number in [0, 1]", lambda value: 0 <= value <= 1)]
Device = Annotated[
    str,
    Rule(
        "auto, cpu, cuda or cuda:<index>",
        lambda value: re.fullmatch(r"auto|cpu|cuda(:\d{1,9})?", value) is not None,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """Policy and value network: a multi-layer perceptron, optionally after a recurrent layer."""

    _target_: str | None  # class of the user's own network, in place of the perceptron

    hidden: Annotated[
        list[Count],
        Rule("a list of positive ints, e.g. [256,128,64]", lambda sizes: len(sizes) > 0),
    ]  # units
    activation: Literal["elu", "relu", "tanh", "silu", "gelu", "selu"]
    separate: bool  # value function has a trunk of its own
    log_std_init: float
    log_std_min: float
    log_std_max: float
    state_dependent_std: bool  # log-std is an output of the network, not a parameter
    rnn: Literal["lstm", "gru"] | None
    rnn_size: Count  # units
    rnn_layers: Count

    def __post_init__(self) -> None:
        """Check relations between fields."""
        if not self.log_std_min <= self.log_std_init <= self.log_std_max:
            raise ValueError(  # `build` puts the section in front: networks of several algorithms have these settings
                "log_std_init must be between log_std_min and log_std_max, got "
                f"{self.log_std_init} outside [{self.log_std_min}, {self.log_std_max}]"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseConfig:
    """How long the exploration noise of continuous actions lasts."""

    kind: Literal["held", "coloured"]
    steps: Annotated[
        list[float],
        Rule("a list of numbers >= 1, e.g. [60] or [1,1,60]", lambda steps: steps and all(x >= 1.0 for x in steps)),
    ]  # control steps, on average: one number for all of an action, or one for each; 1 = white noise


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPolicyConfig:
    """What the algorithms that learn from a rollout of their own policy have in common."""

    horizon: Count  # control steps per env and iteration
    learning_rate: Positive
    schedule: Literal["adaptive", "linear", "constant"]  # adaptive: follows kl_threshold
    gamma: Fraction  # discount per control step
    gae_lambda: Fraction
    value_coef: NotNegative
    entropy_coef: float
    bounds_coef: NotNegative  # loss on action means beyond +-1.1
    max_grad_norm: Positive | None
    reward_scale: Positive
    normalize_obs: bool
    normalize_value: bool
    normalize_advantage: bool
    clip_obs: Positive  # after normalisation [standard deviations]
    precision: Literal["auto", "fp32", "bf16"]
    sequence_length: Count  # control steps; recurrent policies only, fitted to divide horizon
    noise: NoiseConfig
    network: NetworkConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig(OnPolicyConfig):
    """Proximal policy optimisation."""

    epochs: Count  # passes over the data of an iteration
    minibatch_size: Count  # samples; fitted to divide num_envs * horizon, the fit is printed
    schedule_per: Literal["minibatch", "epoch"]  # how often the adaptive schedule acts
    kl_threshold: Positive  # nat
    learning_rate_min: Positive
    learning_rate_max: Positive
    clip: Positive  # of the probability ratio
    value_clip: bool

    def __post_init__(self) -> None:
        """Check relations between fields."""
        if self.learning_rate_min > self.learning_rate_max:
            raise ConfigError(
                "ppo.learning_rate_min must not be above ppo.learning_rate_max, got "
                f"{self.learning_rate_min} > {self.learning_rate_max}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class A2CConfig(OnPolicyConfig):
    """Advantage actor-critic."""

    schedule: Literal["linear", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceConfig(OnPolicyConfig):
    """REINFORCE with a baseline: the whole return, so that gae_lambda is no setting."""

    schedule: Literal["linear", "constant"]
    gae_lambda: float = dataclasses.field(default=1.0, init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImpalaConfig(OnPolicyConfig):
    """Actor-critic that learns from rollouts of older policies."""

    schedule: Literal["linear", "constant"]
    delay: Annotated[int, Rule("an int >= 0", lambda value: value >= 0)]  # rollouts that the last env is behind
    max_policy_lag: Annotated[int, Rule("an int >= 0", lambda value: value >= 0)]  # updates; older samples are dropped
    loss: Literal["gradient", "clipped"]  # of the policy: its gradient with V-trace's advantage, or PPO's clipped loss
    clip: Positive  # largest weight of a sample in the critic's targets
    advantage_clip: Positive  # largest weight of a sample in the advantage, with loss=gradient
    ratio_clip: Positive  # of the probability ratio, with loss=clipped


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """The memory of an off-policy algorithm."""

    capacity: Count  # transitions of all envs
    device: Literal["cpu"] | None  # cpu: in the memory of the host, drawn ahead by a thread; None: beside the learner
    storage: Literal["fp32", "fp16", "bf16"]  # of observations
    save: bool  # in checkpoints: exact resume; without, a resumed run fills it again first
    alpha: NotNegative  # a transition is drawn in proportion to its error to the power of this; 0 = uniformly
    beta: Fraction  # how far weights in the loss make up for that, at the start; 1 at max_iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """Critics of an off-policy algorithm: multi-layer perceptrons."""

    _target_: str | None  # class of the user's own network, in place of each perceptron

    hidden: Annotated[
        list[Count],
        Rule("a list of positive ints, e.g. [256,256]", lambda sizes: len(sizes) > 0),
    ]  # units; of the actor, where there is one
    activation: Literal["elu", "relu", "tanh", "silu", "gelu", "selu"]
    layer_norm: bool  # in the critics
    critics: Count  # independent of each other
    atoms: Annotated[int, Rule("an int > 1", lambda value: 1 < value <= 10_001)] | None  # of a distribution of returns
    value_min: float  # return of the first atom
    value_max: float  # return of the last atom

    def __post_init__(self) -> None:
        """Check relations between fields."""
        if self.value_min >= self.value_max:
            raise ValueError(f"value_min must be below value_max, got {self.value_min} >= {self.value_max}")


@dataclass(frozen=True, slots=True, kw_only=True)
class QNetworkConfig(CriticConfig):
    """Actor and critics: multi-layer perceptrons."""

    critic_hidden: Annotated[
        list[Count],
        Rule("a list of positive ints, e.g. [256,256]", lambda sizes: len(sizes) > 0),
    ]  # units of each critic


@dataclass(frozen=True, slots=True, kw_only=True)
class DQNNetworkConfig(CriticConfig):
    """Critics that say a value for every option."""

    dueling: bool  # a value of the state, and advantages of the options

    @property
    def critic_hidden(self) -> list[int]:
        """Units of each critic."""
        return self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyConfig:
    """What the algorithms that learn from a replay memory have in common."""

    max_iterations: Count | None  # in place of the task's, which suits the horizon of PPO
    horizon: Count  # control steps per env and iteration
    updates: Count  # of the critics, for each control step of all envs
    batch_size: Count  # transitions of an update
    learning_starts: Count  # transitions of random actions before the first update
    learning_rate: Positive
    weight_decay: NotNegative
    max_grad_norm: Positive | None
    gamma: Fraction  # discount per control step
    n_step: Count  # rewards in a target, at most
    tau: Fraction  # part that the target networks move with every update
    clipped: bool  # targets, and the actor, take the smallest Q of the critics; false: the mean
    reward_scale: Positive
    action_scale: Positive  # actions are within +- this
    normalize_obs: bool
    clip_obs: Positive  # after normalisation [standard deviations]
    precision: Literal["auto", "fp32", "bf16"]
    replay: ReplayConfig
    network: QNetworkConfig | DQNNetworkConfig

    def __post_init__(self) -> None:
        """Check relations between fields."""
        if self.learning_starts > self.replay.capacity:
            raise ValueError(
                f"learning_starts={self.learning_starts} is beyond replay.capacity={self.replay.capacity}: it would"
                f" never learn. Try learning_starts={max(1, self.replay.capacity // 10)}"
            )
        if self.batch_size > self.learning_starts:
            raise ValueError(
                f"batch_size={self.batch_size} is more than what is stored when it begins to learn. Try"
                f" learning_starts={self.batch_size}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationsConfig:
    """Transitions that something else has made, beside those of the replay memory."""

    file: str | None  # written by gpusim_rl.learn.demonstrations.record
    share: Annotated[float, Rule("a number above 0 and below 1", lambda value: 0.0 < value < 1.0)]  # of a batch
    imitation: NotNegative  # weight of the distance from their actions in the loss of the actor


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticConfig(OffPolicyConfig):
    """What those of them have in common that learn an actor from critics."""

    policy_delay: Count  # updates of the critics for one of the actor
    network: QNetworkConfig
    noise: NoiseConfig
    demonstrations: DemonstrationsConfig

    def __post_init__(self) -> None:
        """Check relations between fields."""
        OffPolicyConfig.__post_init__(self)
        if self.horizon * self.updates % self.policy_delay:
            raise ValueError(
                f"policy_delay={self.policy_delay} must divide the {self.horizon * self.updates} updates of an"
                " iteration (horizon * updates)"
            )
        if self.demonstrations.file is not None and self.replay.alpha > 0.0:
            raise ValueError("demonstrations.file needs transitions drawn uniformly. Try replay.alpha=0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SACConfig(ActorCriticConfig):
    """Soft actor-critic."""

    alpha: Positive  # weight of the entropy, at the start
    learn_alpha: bool  # so that the entropy is target_entropy
    alpha_learning_rate: Positive
    target_entropy: float | None  # nat; null = log(action_scale) - 1 for each number in an action
    log_std_min: float  # before squashing
    log_std_max: float

    def __post_init__(self) -> None:
        """Check relations between fields."""
        ActorCriticConfig.__post_init__(self)
        if self.log_std_min >= self.log_std_max:
            raise ValueError(f"log_std_min must be below log_std_max, got {self.log_std_min} >= {self.log_std_max}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TD3Config(ActorCriticConfig):
    """Twin delayed deep deterministic policy gradient."""

    noise_min: NotNegative  # standard deviation of exploration, x action_scale: each env draws its own from this
    noise_max: NotNegative  # to this, anew in every episode
    smoothing: NotNegative  # standard deviation of the noise on target actions, x action_scale
    smoothing_clip: NotNegative  # limit of that noise, x action_scale

    def __post_init__(self) -> None:
        """Check relations between fields."""
        ActorCriticConfig.__post_init__(self)
        if self.noise_min > self.noise_max:
            raise ValueError(f"noise_min must not be above noise_max, got {self.noise_min} > {self.noise_max}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DQNConfig(OffPolicyConfig):
    """Deep Q-networks."""

    double: bool  # the online network chooses the action that the target network values
    bins: Annotated[int, Rule("an int > 1", lambda value: 1 < value <= 1001)]  # options of each continuous action
    epsilon_start: Fraction  # part of actions that are random
    epsilon_end: Fraction
    epsilon_decay: Count  # transitions in which it goes from the one to the other, linearly
    epsilon_ladder: NotNegative  # env i of N has epsilon^(1 + epsilon_ladder i / (N - 1)); 0 = all the same
    network: DQNNetworkConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvConfig:
    """Envs of another library, for `task=Gymnasium`."""

    id: str | None  # in the library's registry
    _target_: str | None  # in place of the id: a function of the user's, called with num_envs and kwargs
    kwargs: dict[str, Any]
    vectorization: Literal["sync", "async", "vector_entry_point", "envpool"]
    max_episode_steps: Count | None  # control steps; null = the envs' own
    overlap: bool  # half of them step while the policy chooses for the other half


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorsConfig:
    """Actors: processes that step envs on CPUs, for one learner."""

    engine: Literal["process", "ray"] | None  # what starts them and carries rollouts; None: there are none
    inference: Literal["actor", "learner"]  # where the policy chooses actions
    rollouts: Count | None  # that make a batch, of any actors; None = half as many as there are actors
    threads: Count  # CPU threads of each actor
    max_batch: Count | None  # inference=learner: actors that are answered together, at most; None = all
    max_wait_ms: NotNegative  # inference=learner: time in which an actor waits for others to be answered with [ms]
    tune: bool  # inference=learner: numbers of actors and of max_batch are tried while the run goes on
    address: str | None  # ray: of a cluster; None = that of RAY_ADDRESS, else this machine alone


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """The simulator that steps the scene."""

    name: SimName
    num_threads: Count | None  # mujoco: null = all cores this process may use
    njmax: Count | None  # mjwarp, newton: constraint rows per env; null = estimated
    nconmax: Count | None  # mjwarp, newton: contacts per env; null = estimated
    graph: bool  # mjwarp, newton: capture the step as a Warp graph
    persistent: Literal["auto"] | bool  # mujoco: keep one MjData per env (memory for speed)
    integrator: Literal["euler", "implicit", "implicitfast", "rk4"] | None  # null = the task's
    cone: Literal["pyramidal", "elliptic"] | None  # of friction; null = the task's
    iterations: Count | None  # of the constraint solver, at most; null = the scene's, on Warp 12 if it has none
    ls_iterations: Count | None  # of each line search; null = the scene's, on Warp 20 if it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What a run prints and keeps."""

    console: Literal["auto", "rich", "plain", "json", "quiet"]
    interval: Count  # iterations between two rows
    checkpoint_interval: Count  # iterations between two numbered checkpoints
    keep: Annotated[int, Rule("an int >= 0", lambda value: value >= 0)]  # numbered checkpoints; 0 = all
    tensorboard: bool
    print_config: bool
    dir: str  # run folders are <dir>/<task>/<time>


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Evaluations beside the training, in a process of its own."""

    interval: Annotated[int, Rule("an int >= 0", lambda value: value >= 0)]  # iterations between two; 0 = none
    num_envs: Count  # envs simulated together
    episodes: Count  # whole episodes of each env
    seed: Annotated[int, Rule("an int in [0, 2^31)", lambda value: 0 <= value < 2**31)]  # of the envs


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """Checks and measurements that cost speed."""

    check_task: bool  # verify shape, dtype and finiteness of every task hook at every step
    check_device: bool  # name the first tensor on another device than it should be, in every iteration
    profile: Annotated[int, Rule("an int >= 0", lambda value: value >= 0)]  # steady iterations to trace; 0 = none


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One training or evaluation run: what `python train.py` was asked for."""

    num_envs: Count  # envs simulated together
    seed: Annotated[int, Rule("an int in [-1, 2^31)", lambda value: -1 <= value < 2**31)]  # -1 = random
    max_iterations: Count
    device: Device  # for physics and learning
    sim_device: Device | None  # null = device
    rl_device: Device | None  # null = device
    eval_device: Device | None  # null = as in the training
    graph: Literal["auto", "off", "split", "step", "rollout"]  # what CUDA graphs hold
    compile: Literal["off", "learner", "all"]  # what torch.compile makes faster
    checkpoint: str | None  # run folder, .pt file, or task name (its latest run)
    trust: bool  # import the classes that the checkpoint's run names, whatever they are
    test: bool  # evaluate the checkpoint instead of training
    experiment: (
        Annotated[
            str,
            Rule(
                "a folder name",
                lambda value: re.fullmatch(r"[\w.-]+", value) is not None and value not in (".", ".."),
            ),
        ]
        | None
    )  # run folder name; null = name of the task
    headless: bool
    multi_gpu: bool  # one of the processes of torchrun, which learn together
    num_actors: Count | None  # with actors=process or ray; num_envs is of each. None = one for each CPU
    torch_deterministic: bool
    wandb_activate: bool
    wandb_project: str
    wandb_entity: str | None
    wandb_group: str | None
    wandb_name: str | None
    wandb_tags: list[str]
    env: EnvConfig  # envs of another library
    task: Any  # the task's own Config (gpusim_rl.env.task.TaskConfig)
    algo: str  # name of the algorithm, and of the section with its settings
    algorithm: Any  # the algorithm's own Config, e.g. PPOConfig
    sim: SimConfig
    actors: ActorsConfig  # that step envs for one learner
    eval: EvalConfig  # beside the training
    log: LogConfig
    debug: DebugConfig

    def __post_init__(self) -> None:
        """Check relations between fields."""
        if not self.headless:
            raise ConfigError(
                "headless=false: training opens no window. Try python tools/play.py <run folder> beside it: it follows"
                " the run as it learns"
            )
        if self.actors.engine is None and self.num_actors is not None:
            raise ConfigError(
                f"num_actors={self.num_actors} has no effect without actors. Try num_actors=null, or actors=process"
            )
        if self.actors.engine is not None and self.multi_gpu:
            raise ConfigError(
                f"multi_gpu=true with actors={self.actors.engine}: actors send to one learner. Try multi_gpu=false"
            )


ALGORITHMS: dict[str, tuple[str, type]] = {
    "ppo": ("gpusim_rl.learn.ppo.PPO", PPOConfig),
    "a2c": ("gpusim_rl.learn.a2c.A2C", A2CConfig),
    "reinforce": ("gpusim_rl.learn.reinforce.Reinforce", ReinforceConfig),
    "impala": ("gpusim_rl.learn.impala.Impala", ImpalaConfig),
    "sac": ("gpusim_rl.learn.sac.SAC", SACConfig),
    "td3": ("gpusim_rl.learn.td3.TD3", TD3Config),
    "dqn": ("gpusim_rl.learn.dqn.DQN", DQNConfig),
}
"""Class and settings of our algorithms by name: they are checked before torch is imported."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A run, composed, checked, and with its classes loaded: what a trainer is made from.

    Attributes:
        cfg: All settings.
        task_class: The task; `cfg.task` is its configuration. Or an environment of another library, with `cfg.env`.
        algorithm_class: What learns; `cfg.algorithm` is its configuration.
        config: The composed configuration as plain values, for the run folder and the checkpoints.
        overrides: The command line, from which `train.py` composes the same configuration.
        checkpoint: What `cfg.checkpoint` names; None for a new run.
        config_dir: The user's folder (`-cd`); None without one.
    """

    cfg: RunConfig
    task_class: type[Any]  # of Task, or of Environment
    algorithm_class: type[Algorithm]
    config: dict[str, Any]
    overrides: list[str]
    checkpoint: Checkpoint | None = None
    config_dir: Path | None = None
