"""Names, types and rules of all settings; cfg/ has values, meanings and units. Does not import torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from gpusim_rl.errors import ConfigError, UserError
from gpusim_rl.settings.simulators import SIMULATORS

if TYPE_CHECKING:
    SimName = str  # a type checker does not see the registry
else:
    SimName = Literal[("auto", *SIMULATORS)]

T = TypeVar("T")
TASK_DEFAULTS = ("randomize", "randomization_params", "reset_from", "observations", "drives")
"""Keys of `task` with a default in cfg/config.yaml."""
PER_CALL_SETTINGS = ("checkpoint", "start_from", "test", "trust", "log.console", "log.video")
"""Settings of a single call, which are never restored from a run folder."""
MACHINE_SETTINGS = (
    *("log.dir", "*.demonstrations.file", "distill.teacher", "*.teacher.run"),  # paths
    *("actors", "num_actors"),  # processes, and an address whose messages are unpickled
    "wandb_activate",  # sends logs to a server
)
"""Machine-specific settings, which are not restored from a run folder either; a resume reports them."""


@dataclass(frozen=True)
class Rule:
    """Rule for a value, in words and as a test: `Annotated[int, Rule("a positive int", lambda value: value > 0)]`."""

    words: str
    test: Callable[[Any], object]  # truthy if valid


LARGEST_COUNT = 2**31 - 1  # limit of 32-bit counters in simulators
LARGEST_INT = 2**63 - 1  # largest tensor integer
LARGEST_FLOAT = 1e18  # largest number; a product of two still fits a float32

Count = Annotated[int, Rule("a positive int", lambda value: 0 < value <= LARGEST_COUNT)]
Natural = Annotated[int, Rule("an int >= 0", lambda value: value >= 0)]
Positive = Annotated[float, Rule("a positive number", lambda value: value > 0)]
NotNegative = Annotated[float, Rule("a number >= 0", lambda value: value >= 0)]
Fraction = Annotated[float, Rule("a number in [0, 1]", lambda value: 0 <= value <= 1)]
Limits = Annotated[list[float], Rule("[low, high] with low <= high", lambda x: len(x) == 2 and x[0] <= x[1])]
Bounds = Annotated[list[float], Rule("three numbers >= 0", lambda most: len(most) == 3 and min(most) >= 0)]
Units = Annotated[list[Count], Rule("a list of positive ints, e.g. [256,128,64]", lambda sizes: len(sizes) > 0)]
Durations = Annotated[list[float], Rule("a list of numbers >= 1, e.g. [1,1,60]", lambda it: it and min(it) >= 1.0)]
Activation = Literal["elu", "relu", "tanh", "silu", "gelu", "selu"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
DEVICE, FOLDER_NAME = re.compile(r"auto|cpu|cuda(:\d{1,9})?"), re.compile(r"(?!\.\.?\Z)[\w.-]+")
Device = Annotated[str, Rule("auto, cpu, cuda or cuda:<index>", DEVICE.fullmatch)]
FolderName = Annotated[str, Rule("a folder name of letters, digits and . _ -", FOLDER_NAME.fullmatch)]


def _check_order(settings: Any, low: str, high: str, *, strict: bool = False) -> None:
    """Raise UserError unless `low <= high` (`low < high` if `strict`)."""
    a, b = getattr(settings, low), getattr(settings, high)
    if a > b or (strict and a == b):
        raise UserError(key=low, expected=f"{'below' if strict else 'at most'} {high}={b}", got=a)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Image encoder network."""

    _target_: str | None
    kind: Literal["spatial", "nature", "impala"]
    frames: Count

    def describe(self) -> str:
        """Return a description for the log."""
        return f"encoder {self._target_ or self.kind} (frames: {self.frames})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftedEncoderConfig(EncoderConfig):
    """Image encoder with random image shifts during learning."""

    shift: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """Policy and value network: a multi-layer perceptron, optionally after a recurrent layer."""

    _target_: str | None
    hidden: Units
    activation: Activation
    separate: bool
    log_std_init: float
    log_std_min: float
    log_std_max: float
    state_dependent_std: bool
    rnn: Literal["lstm", "gru"] | None
    rnn_size: Count
    rnn_layers: Count
    encoder: EncoderConfig

    def __post_init__(self) -> None:
        _check_order(self, "log_std_min", "log_std_init")
        _check_order(self, "log_std_init", "log_std_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseConfig:
    """Time correlation of exploration noise for continuous actions."""

    kind: Literal["held", "coloured"]
    steps: Durations


WHITE = NoiseConfig(kind="held", steps=[1.0])  # fresh noise in every control step


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """Base settings of an algorithm, with declarations for its subclasses to override."""

    structure: ClassVar[tuple[str, ...]] = ("horizon", "network")
    """Settings that determine the tensors of `state_dict`; a resume must not change them."""
    policy_structure: ClassVar[tuple[str, ...]] = ("network",)
    """Subset of `structure` that determines the policy's tensors."""
    data_parallel: ClassVar[bool] = False
    """True if `update` reduces over data-parallel processes with `LearnerContext.collective`."""

    def batch_rows(self, num_envs: int) -> int:
        """Return the number of rows of the largest matrices, which sets torch's thread count."""
        return num_envs


def declarations(config: type) -> type[AlgorithmConfig]:
    """Return `config`, or AlgorithmConfig if `config` is a plain dataclass."""
    return config if issubclass(config, AlgorithmConfig) else AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPolicyConfig(AlgorithmConfig):
    """Base settings of on-policy algorithms."""

    structure = ("horizon", "network", "normalize_obs", "normalize_value")
    policy_structure = ("network", "normalize_obs", "normalize_value")
    data_parallel = True

    horizon: Count
    learning_rate: Positive
    schedule: Literal["adaptive", "linear", "constant"]
    gamma: Fraction
    gae_lambda: Fraction
    value_coef: NotNegative
    entropy_coef: float
    bounds_coef: NotNegative
    max_grad_norm: Positive | None
    reward_scale: Positive
    normalize_obs: bool
    normalize_value: bool
    normalize_advantage: bool
    clip_obs: Positive
    precision: Precision
    sequence_length: Count
    noise: NoiseConfig
    network: NetworkConfig

    def batch_rows(self, num_envs: int) -> int:
        """Return the number of samples per optimiser step: the whole rollout."""
        return num_envs * self.horizon


@dataclass(frozen=True, slots=True, kw_only=True)
class SymmetryConfig:
    """Use of the robot's left-right symmetry in learning."""

    augment: bool
    mirror_loss: NotNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class RNDConfig:
    """Random network distillation: a reward for novel states."""

    weight: NotNegative
    schedule: Literal["constant", "step", "linear"]
    final_weight: NotNegative
    begin: Natural
    end: Natural
    group: str | None
    normalize: bool
    learning_rate: Positive
    hidden: Units
    activation: Activation
    outputs: Count

    def __post_init__(self) -> None:
        _check_order(self, "begin", "end")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """Imitation of a trained policy, in addition to the rewards."""

    run: str | None
    weight: NotNegative
    begin: Natural
    end: Natural

    def __post_init__(self) -> None:
        if self.run is not None and not self.weight:
            raise UserError("no effect with weight=0", key="run", hint="Try weight=1")
        if self.begin and not self.end:
            raise UserError("no effect with end=0 (constant weight)", key="begin", hint=f"Try end={2 * self.begin}")
        _check_order(self, "begin", "end")


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig(OnPolicyConfig):
    """Proximal policy optimisation."""

    epochs: Count
    minibatch_size: Count
    schedule_per: Literal["minibatch", "epoch"]
    kl_threshold: Positive
    learning_rate_min: Positive
    learning_rate_max: Positive
    clip: Positive
    value_clip: bool
    symmetry: SymmetryConfig
    rnd: RNDConfig
    teacher: TeacherConfig
    extensions: dict[str, Any]

    def __post_init__(self) -> None:
        _check_order(self, "learning_rate_min", "learning_rate_max")

    def batch_rows(self, num_envs: int) -> int:
        """Return the number of samples per minibatch, or of acting envs if larger."""
        return max(num_envs, min(self.minibatch_size, num_envs * self.horizon))


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscriminatorConfig:
    """Discriminator between reference-motion and agent features."""

    loss: Literal["logistic", "least_squares"]
    hidden: Units
    activation: Literal["relu", "elu", "tanh"]
    learning_rate: Positive
    batch_size: Count
    gradient_penalty: NotNegative
    penalized: Literal["auto", "reference", "agent", "both"]
    logit_decay: NotNegative
    weight_decay: NotNegative
    replay: Count
    replay_share: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class AMPConfig(PPOConfig):
    """Adversarial motion priors."""

    structure = (*PPOConfig.structure, "discriminator.hidden", "discriminator.replay", "difference")

    task_weight: NotNegative
    style_weight: NotNegative
    difference: bool
    discriminator: DiscriminatorConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class A2CConfig(OnPolicyConfig):
    """Advantage actor-critic."""

    schedule: Literal["linear", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceConfig(OnPolicyConfig):
    """REINFORCE with a baseline; `gae_lambda` is fixed at 1 (full returns)."""

    schedule: Literal["linear", "constant"]
    gae_lambda: float = dataclasses.field(default=1.0, init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedConfig(AlgorithmConfig):
    """Base settings of algorithms that imitate given actions."""

    structure = ("horizon", "network", "normalize_obs")
    policy_structure = ("network", "normalize_obs")
    data_parallel = True

    max_iterations: Count | None
    horizon: Count
    learning_rate: Positive
    schedule: Literal["linear", "constant"]
    max_grad_norm: Positive | None
    normalize_obs: bool
    clip_obs: Positive
    precision: Precision
    noise: NoiseConfig
    network: NetworkConfig

    def __post_init__(self) -> None:
        if self.network.separate:
            raise UserError("no value function to separate", key="network.separate", hint="Try network.separate=false")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig(SupervisedConfig):
    """Policy distillation."""

    teacher: str | None
    loss: Literal["mse", "huber"]
    epochs: Count
    sequence_length: Count

    def batch_rows(self, num_envs: int) -> int:
        """Return the number of samples per optimiser step."""
        return num_envs * min(self.horizon, self.sequence_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClonedConfig:
    """Demonstrations for behaviour cloning."""

    file: str | None
    held_out: Annotated[float, Rule("a number in [0, 1)", lambda value: 0.0 <= value < 1.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BCConfig(SupervisedConfig):
    """Behaviour cloning."""

    gradient_steps: Count
    batch_size: Count
    loss: Literal["mse", "nll"]
    demonstrations: ClonedConfig
    sequence_length: int = dataclasses.field(default=1, init=False)  # no recurrent policies

    def __post_init__(self) -> None:
        SupervisedConfig.__post_init__(self)
        if self.network.rnn is not None:
            problem = "recurrent policies are not supported: control steps are learned independently"
            raise UserError(problem, key="network.rnn", hint="Try network.rnn=null")

    def batch_rows(self, num_envs: int) -> int:
        """Return the number of demonstrated steps per optimiser step, or of acting envs if larger."""
        return max(num_envs, self.batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImpalaConfig(OnPolicyConfig):
    """Actor-critic learning from rollouts of older policies."""

    structure = (*OnPolicyConfig.structure, "delay")

    schedule: Literal["linear", "constant"]
    delay: Natural
    max_policy_lag: Natural
    loss: Literal["gradient", "clipped"]
    clip: Positive
    advantage_clip: Positive
    ratio_clip: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """Replay buffer."""

    capacity: Count
    device: Literal["cpu"] | None
    storage: Literal["fp32", "fp16", "bf16"]
    compress: bool
    save: bool
    alpha: NotNegative
    beta: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """Critics of an off-policy algorithm: multi-layer perceptrons."""

    _target_: str | None
    hidden: Units
    activation: Activation
    layer_norm: bool
    critics: Count
    atoms: Annotated[int, Rule("an int > 1", lambda value: 1 < value <= 10_001)] | None
    value_min: float
    value_max: float
    encoder: ShiftedEncoderConfig

    def __post_init__(self) -> None:
        _check_order(self, "value_min", "value_max", strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class QNetworkConfig(CriticConfig):
    """Actor and critics: multi-layer perceptrons."""

    critic_hidden: Units


@dataclass(frozen=True, slots=True, kw_only=True)
class DQNNetworkConfig(CriticConfig):
    """Critics with one Q value per option of each action dimension."""

    dueling: bool

    @property
    def critic_hidden(self) -> list[int]:
        """Hidden layer sizes of each critic."""
        return self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationsConfig:
    """Demonstrated transitions that are added to replay batches."""

    file: str | None
    share: Annotated[float, Rule("a number in (0, 1)", lambda value: 0.0 < value < 1.0)]
    imitation: NotNegative


NO_DEMONSTRATIONS = DemonstrationsConfig(file=None, share=0.5, imitation=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyConfig(AlgorithmConfig):
    """Base settings of off-policy algorithms."""

    structure = ("network", "normalize_obs", "replay.capacity", "replay.storage", "replay.compress", "replay.alpha")
    policy_structure = ("network", "normalize_obs")
    data_parallel = True

    max_iterations: Count | None
    horizon: Count
    updates: Count
    batch_size: Count
    learning_starts: Count
    learning_rate: Positive
    weight_decay: NotNegative
    max_grad_norm: Positive | None
    gamma: Fraction
    n_step: Count
    tau: Fraction
    clipped: bool
    reward_scale: Positive
    action_scale: Positive
    normalize_obs: bool
    clip_obs: Positive
    precision: Precision
    replay: ReplayConfig
    network: QNetworkConfig | DQNNetworkConfig
    # Settable only for algorithms with an actor
    noise: NoiseConfig = dataclasses.field(default=WHITE, init=False)
    demonstrations: DemonstrationsConfig = dataclasses.field(default=NO_DEMONSTRATIONS, init=False)

    def __post_init__(self) -> None:
        if self.learning_starts > self.replay.capacity:
            problem, expected = "no update would ever run", f"at most replay.capacity={self.replay.capacity}"
            hint = f"Try learning_starts={max(self.batch_size, self.replay.capacity // 10)}"
            raise UserError(problem, key="learning_starts", expected=expected, got=self.learning_starts, hint=hint)
        if self.batch_size > self.learning_starts:
            expected, hint = f"at least batch_size={self.batch_size}", f"Try learning_starts={self.batch_size}"
            raise UserError(key="learning_starts", expected=expected, got=self.learning_starts, hint=hint)

    def batch_rows(self, num_envs: int) -> int:
        """Return the number of transitions per batch, or of acting envs if larger."""
        return max(num_envs, self.batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticConfig(OffPolicyConfig):
    """Base settings of off-policy actor-critics."""

    policy_delay: Count
    network: QNetworkConfig
    noise: NoiseConfig
    demonstrations: DemonstrationsConfig

    def __post_init__(self) -> None:
        OffPolicyConfig.__post_init__(self)
        if (number := self.horizon * self.updates) % self.policy_delay:
            expected = f"a divisor of horizon * updates = {number}"
            raise UserError(key="policy_delay", expected=expected, got=self.policy_delay)
        if self.demonstrations.file is not None and self.replay.alpha > 0.0:
            raise UserError("requires uniform sampling", key="demonstrations.file", hint="Try replay.alpha=0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SACConfig(ActorCriticConfig):
    """Soft actor-critic."""

    alpha: Positive
    learn_alpha: bool
    alpha_learning_rate: Positive
    target_entropy: float | None
    log_std_min: float
    log_std_max: float

    def __post_init__(self) -> None:
        ActorCriticConfig.__post_init__(self)
        _check_order(self, "log_std_min", "log_std_max", strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TD3Config(ActorCriticConfig):
    """Twin delayed deep deterministic policy gradient."""

    noise_min: NotNegative
    noise_max: NotNegative
    smoothing: NotNegative
    smoothing_clip: NotNegative

    def __post_init__(self) -> None:
        ActorCriticConfig.__post_init__(self)
        _check_order(self, "noise_min", "noise_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class DQNConfig(OffPolicyConfig):
    """Deep Q-networks."""

    structure = (*OffPolicyConfig.structure, "bins", "action_scale")
    policy_structure = (*OffPolicyConfig.policy_structure, "bins")

    double: bool
    bins: Annotated[int, Rule("an int > 1", lambda value: 1 < value <= 1001)]
    epsilon_start: Fraction
    epsilon_end: Fraction
    epsilon_decay: Count
    epsilon_ladder: NotNegative
    network: DQNNetworkConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvConfig:
    """Envs of another library, for `task=Gymnasium`, `task=IsaacLab` and `task=MjLab`."""

    id: str | None
    _target_: str | None
    kwargs: dict[str, Any]
    vectorization: Literal["sync", "async", "vector_entry_point", "envpool"]
    max_episode_steps: Count | None
    cfg: dict[str, Any]
    physics: str | None


IMAGENET_ENCODERS = ("efficientnet", "resnet18")  # encoders pretrained on ImageNet


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedConfig:
    """Pretrained image encoder."""

    init_from: str | None
    freeze: bool
    frames: Count

    def __post_init__(self) -> None:
        if self.freeze and self.init_from is None:
            hint = "To create an encoder, run `gpusim-rl pretrain-encoder TASK`"
            raise UserError("requires pretrained.init_from", key="freeze=true", hint=hint)
        if self.init_from in IMAGENET_ENCODERS and not self.freeze:
            key = f"init_from={self.init_from}"
            raise UserError("cannot be fine-tuned", key=key, hint="Try freeze=true")
        if self.frames > 1 and not self.freeze:
            hint = f"Try the algorithm's encoder, such as ppo.network.encoder.frames={self.frames}"
            raise UserError("requires pretrained.freeze=true", key="frames", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorsConfig:
    """Actors: CPU processes that step envs for one learner."""

    engine: Literal["process", "ray"] | None
    inference: Literal["actor", "learner"]
    rollouts: Count | None
    threads: Count
    max_batch: Count | None
    max_wait_ms: NotNegative
    timeout_s: Positive | None
    address: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """Simulator and solver settings."""

    name: SimName
    num_threads: Count | None
    njmax: Count | None
    nconmax: Count | None
    graph: bool
    persistent: Literal["auto"] | bool
    integrator: Literal["euler", "implicit", "implicitfast", "rk4"] | None
    cone: Literal["pyramidal", "elliptic"] | None
    iterations: Count | None
    ls_iterations: Count | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Output and files of a run."""

    console: Literal["auto", "rich", "plain", "json", "quiet"]
    interval: Count
    checkpoint_interval: Count
    keep: Natural
    tensorboard: bool
    video: bool
    print_config: bool
    dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Evaluations during training, in a separate process."""

    interval: Natural
    num_envs: Count
    episodes: Count
    seed: Annotated[int, Rule("an int in [0, 2^31)", lambda value: 0 <= value < 2**31)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """Checks and measurements that slow a run down."""

    check_task: bool
    check_device: bool
    profile: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Settings of a training or evaluation run."""

    num_envs: Count
    seed: Annotated[int, Rule("an int in [-1, 2^31)", lambda value: -1 <= value < 2**31)]
    max_iterations: Count
    device: Device
    sim_device: Device | None
    rl_device: Device | None
    eval_device: Device | None
    graph: Literal["auto", "off", "split", "step", "rollout"]
    compile: Literal["auto", "off", "learner", "all"]
    checkpoint: str | None
    start_from: str | None
    trust: bool
    test: bool
    experiment: FolderName | None
    headless: bool
    multi_gpu: bool
    lost_after_s: Positive
    num_actors: Count | None
    torch_deterministic: bool
    recipe: FolderName | None
    wandb_activate: bool
    wandb_project: str
    wandb_entity: str | None
    wandb_group: str | None
    wandb_name: str | None
    wandb_tags: list[str]
    env: EnvConfig
    task: Any  # the task's Config (gpusim_rl.env.task.TaskConfig)
    algo: str  # name of the algorithm, and of the section with its settings
    algorithm: Any  # the algorithm's Config, e.g. PPOConfig
    sim: SimConfig
    pretrained: PretrainedConfig
    actors: ActorsConfig
    eval: EvalConfig
    log: LogConfig
    debug: DebugConfig

    def __post_init__(self) -> None:
        actors, number = self.actors.engine, self.num_actors
        if not self.headless:
            hint = "Try gpusim-rl play <run folder> to watch the run"
            raise ConfigError("training does not open a window", key="headless=false", hint=hint)
        if self.checkpoint is not None and self.start_from is not None:
            raise ConfigError(f"start_from={self.start_from} has no effect with checkpoint", hint="Try start_from=null")
        if actors is None and number is not None:
            problem = f"num_actors={number} has no effect without actors"
            raise ConfigError(problem, hint="Try num_actors=null, or actors=process")
        if actors is not None and self.multi_gpu:
            raise ConfigError("not supported with actors", key="multi_gpu=true", hint="Try multi_gpu=false")


ALGORITHMS: dict[str, tuple[str, type]] = {
    "ppo": ("gpusim_rl.learn.ppo.PPO", PPOConfig),
    "amp": ("gpusim_rl.learn.ppo.PPO", AMPConfig),
    "a2c": ("gpusim_rl.learn.a2c.A2C", A2CConfig),
    "reinforce": ("gpusim_rl.learn.reinforce.Reinforce", ReinforceConfig),
    "distill": ("gpusim_rl.learn.supervised.Distill", DistillConfig),
    "bc": ("gpusim_rl.learn.supervised.BC", BCConfig),
    "impala": ("gpusim_rl.learn.impala.Impala", ImpalaConfig),
    "sac": ("gpusim_rl.learn.sac.SAC", SACConfig),
    "td3": ("gpusim_rl.learn.td3.TD3", TD3Config),
    "dqn": ("gpusim_rl.learn.dqn.DQN", DQNConfig),
}
"""Class path and settings of built-in algorithms by name, so that settings are checked before torch is imported."""


def algorithm_of(cls: type) -> str | None:
    """Return the built-in algorithm that a class is or extends, or None."""
    names: dict[tuple[str, type | None], str] = {(of[0], None): name for name, of in reversed(ALGORITHMS.items())}
    names |= {of: name for name, of in ALGORITHMS.items()}
    configs = *getattr(getattr(cls, "Config", None), "__mro__", ()), None
    pairs = [(f"{base.__module__}.{base.__qualname__}", config) for base in cls.__mro__ for config in configs]
    return next((names[pair] for pair in pairs if pair in names), None)
