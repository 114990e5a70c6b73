"""Every setting has a name, a type, a unit and a rule here; its value is in cfg/*.yaml.

`build_run` turns the composed yaml into frozen dataclasses, strictly: an unknown key, a missing
key, a wrong type or a value out of range is one line. Free of torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from gpusim_rl.errors import ConfigError, closest, did_you_mean
from gpusim_rl.paths import Checkpoint
from gpusim_rl.simulators import SIMULATORS

if TYPE_CHECKING:
    from pathlib import Path

    from omegaconf import DictConfig

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
class PopulationConfig:
    """The population that a run is a member of: `tools/tune.py method=pbt` sets it."""

    folder: str | None  # of the population; None = the run is of none
    member: Annotated[int, Rule("an int >= 0", lambda value: value >= 0)]  # its number


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
    compile: Literal["off", "learner", "all", "auto"]  # what torch.compile makes faster
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
    pbt: PopulationConfig  # that the run is a member of
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
        if self.pbt.folder is not None and (self.multi_gpu or self.actors.engine is not None):
            raise ConfigError("pbt.folder: a member of a population is one process. Try multi_gpu=false actors=none")
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


def plain(cfg: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Resolve a composed config into nested plain dicts and lists."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        node = OmegaConf.create(dict(cfg)) if isinstance(cfg, dict) else cfg
        container = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if getattr(error, "full_key", None) else ""
        raise ConfigError(f"{key}{str(error).splitlines()[0]}") from None
    return typing.cast("dict[str, Any]", container)


def build_run(
    config: Mapping[str, Any],
    *,
    task_class: type,
    algorithm_class: type | None = None,
) -> RunConfig:
    """Turn a composed config into a RunConfig, strictly.

    Args:
        config: Plain values: a composed config, or the parsed config.yaml of a run folder.
        task_class: Task to take `Config` from.
        algorithm_class: Algorithm to take `Config` from; None where it is one of ours.

    Raises:
        ConfigError: A key is unknown or missing, or a value is not what it must be.
    """
    checked = check_settings(config)
    task = {key: value for key, value in _section(config.get("task"), "task").items() if key != "_target_"}
    check_hooks(task_class, "task")
    if algorithm_class is not None:
        check_hooks(algorithm_class, "algorithm")
    checked["task"] = build(settings_class(task_class), task, path="task")
    if "algorithm" not in checked:
        if algorithm_class is None:
            raise ConfigError(f"algo={checked['algo']}: its class is needed to check its settings")
        section = _section(config.get(checked["algo"]), checked["algo"])
        checked["algorithm"] = build(settings_class(algorithm_class), section, path=checked["algo"])
    return RunConfig(**checked)


def check_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Check all that can be checked without importing the task, or an algorithm of the user's.

    Returns:
        The fields of RunConfig, except `task`; and except `algorithm`, if it is not one of ours.
    """
    algo = _section(config.get("algo"), "algo")
    for key in algo.keys() - {"name", "_target_"}:
        raise unknown_key(f"algo.{key}", ["algo.name", "algo._target_"])
    name = algo.get("name")
    if not isinstance(name, str) or not name.isidentifier() or name in _hints(RunConfig):
        raise ConfigError(f"algo.name must be the name of a section of its own, such as 'ppo', got {name!r}")
    sections = {"task", "algo", name, *ALGORITHMS}  # a task may hold tuned values for several algorithms
    settings = {key: node for key, node in config.items() if key not in sections}
    checked = _fields(RunConfig, settings, path="", skip=("task", "algo", "algorithm"))
    checked["algo"] = name
    target, ours = ALGORITHMS.get(name, (None, None))
    if ours is not None and algo.get("_target_") == target:
        checked["algorithm"] = build(ours, config.get(name), path=name)
    if not _section(config.get("task"), "task").keys() - set(TASK_DEFAULTS):
        raise ConfigError(_NO_TASK)
    return checked


def build(cls: type[T], node: Any, path: str = "") -> T:
    """Build a dataclass from nested plain values, strictly; `path` is where `node` stands."""
    values = _fields(cls, _section(node, path), path)
    try:
        return cls(**values)
    except (ConfigError, ValueError) as error:  # __post_init__: relations between fields
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: {error}" if path else str(error)) from None


def settings_class(owner: type) -> type:
    """Return the settings dataclass of a task or an algorithm."""
    cls = getattr(owner, "Config", None)
    if not (inspect.isclass(cls) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f"{owner.__module__}.{owner.__qualname__}.Config must be a dataclass, got {cls!r}")
    return cls


def check_hooks(cls: type, kind: str) -> None:
    """Stop when a task or an algorithm does not define a method that every one has; `kind` says which of the two."""
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        own = [name for name in vars(cls) if not name.startswith("__")]
        hints = {name: close for name in missing if (close := closest(name, own))}
        hint = "".join(f" It has {close!r}: did you mean {name!r}?" for name, close in hints.items())
        raise ConfigError(f"{kind} {cls.__name__} does not define {', '.join(missing)}.{hint}".removesuffix("."))


def known_keys() -> list[str]:
    """All keys a command line may set but those of the task, e.g. `ppo.network.hidden`."""

    def keys(cls: type, prefix: str) -> list[str]:
        found = []
        fixed = {field.name for field in dataclasses.fields(cls) if not field.init}
        for name, hint in _hints(cls).items():
            if name in fixed:
                continue
            found.append(prefix + name)
            if dataclasses.is_dataclass(hint):
                found += keys(typing.cast(type, hint), f"{prefix}{name}.")
        return found

    ours = [key for name, (_, settings) in ALGORITHMS.items() for key in [name, *keys(settings, f"{name}.")]]
    return [key for key in keys(RunConfig, "") if key != "algorithm"] + ours


def apply_overrides(config: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `config` with `key=value` strings applied to keys that exist."""
    if not overrides:
        return config
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    config = plain(config)
    for text in overrides:
        try:
            [override] = OverridesParser.create().parse_overrides([text])
            value = override.value()
        except OverrideParseException:
            raise ConfigError(f"cannot read {text!r}: expected key=value, e.g. num_envs=64") from None
        node, (*parents, name) = config, override.key_or_group.split(".")
        is_open = in_open_section(override.key_or_group)
        for parent in parents:
            if is_open and isinstance(node, dict) and node.get(parent) is None:
                node[parent] = {}
            node = node.get(parent, {}) if isinstance(node, dict) else {}
        if is_open and isinstance(node, dict):
            node[name] = _merged(node.get(name), value)  # as Hydra does it
            continue
        if not isinstance(node, dict) or name not in node:
            raise unknown_key(
                override.key_or_group,
                known_keys() + [f"task.{key}" for key in config.get("task", {})],
            )
        node[name] = value
    return config


def in_open_section(key: str) -> bool:
    """Whether a key is one of `OPEN_SECTIONS`, or below one."""
    return any(f"{key}.".startswith(f"{section}.") for section in OPEN_SECTIONS)


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}


ISAACGYMENVS = {
    "capture_video": "Try python tools/record.py <run folder>, during the training or after it; it needs no display",
    "capture_video_freq": "Try python tools/record.py <run folder>",
    "capture_video_len": "Try python tools/record.py <run folder> --steps <control steps>",
    "pbt": "Try python tools/tune.py method=pbt population=8: docs/distributed.md",
    "num_threads": "Did you mean 'sim.num_threads'?",
    "physics_engine": f"Try one of sim={', '.join(SIMULATORS)}",
    "pipeline": f"Try one of sim={', '.join(SIMULATORS)}, and device=cpu or cuda",
    "graphics_device_id": "Training draws nothing. Try python tools/record.py <run folder>",
    "task.sim": "Try task.physics_hz (substeps / dt) and task.control_hz; solver settings are in the MJCF",
    "task.env": "A task's settings are right below task, e.g. task.episode_length; docs/migrating_from_isaacgymenvs.md",
    "train": "Learning is below ppo, e.g. ppo.learning_rate; docs/migrating_from_isaacgymenvs.md has all names",
}
"""What to say to those who type its keys, and what is below them."""

RENAMED = {"ppo.compile": "It is compile=learner now, or compile=off"}
"""What to say to those who type a key of an older version."""


def unknown_key(key: str, known: Sequence[str]) -> ConfigError:
    """The error for a key that does not exist, with the closest key that does."""
    if key in known:
        return ConfigError(f"{key!r} cannot be changed like this: expected key=value, e.g. num_envs=64")
    for name, answer in {**ISAACGYMENVS, **RENAMED}.items():
        if f"{key}.".startswith(f"{name}."):
            return ConfigError(f"unknown key {key!r}. {answer}")
    section, _, leaf = key.rpartition(".")
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section]
    elsewhere = {name.rpartition(".")[2]: name for name in reversed(known)}  # of equals the first
    if close := closest(leaf, siblings):
        name = f"{section}.{close}" if section else close
        hint = f"Did you mean {name!r}?"
    elif close := closest(leaf, elsewhere, 0.75 if section and siblings else 0.6):  # the section is well known
        hint = f"Did you mean {elsewhere[close]!r}?"
    elif close := closest(key, known) if not (section and siblings) else None:
        hint = f"Did you mean {close!r}?"
    elif section and siblings:
        hint = f"{section} has: {', '.join(siblings)}"
    else:
        hint = "Try python train.py --help, or --cfg job for all keys"
    return ConfigError(f"unknown key {key!r}. {hint}")


def _fields(cls: type, node: Mapping[str, Any], path: str, skip: Sequence[str] = ()) -> dict[str, Any]:
    """Check `node` against the fields of a dataclass and return the converted values."""
    prefix = f"{path}." if path else ""
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init and field.name not in skip}
    known = [f"{prefix}{name}" for name in fields] if path else known_keys()
    for key in node:
        if key not in fields:
            raise unknown_key(f"{prefix}{key}", known)
    values = {}
    for name, hint in _hints(cls).items():
        if name not in fields:
            continue
        field = fields[name]
        if name in node:
            values[name] = _convert(node[name], hint, f"{prefix}{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"missing key {prefix + name!r}: it has no default, give it a value in the yaml")
    return values


_NO_TASK = "no task: try task=Cartpole, or `gpusim-rl list` for all tasks"


def _section(node: Any, path: str) -> Mapping[str, Any]:
    if node is None and path == "task":
        raise ConfigError(_NO_TASK)
    if not isinstance(node, Mapping):
        choose = f", or algo={path} to choose the algorithm" if path in ALGORITHMS else ""
        raise ConfigError(
            f"{path} must be a section with keys of its own, got {node!r}. Try {path}.<key>=<value>{choose}"
        )
    return node


def _hints(cls: type) -> dict[str, Any]:
    # With locals given, names are looked up in the modules of the class and of its bases.
    return typing.get_type_hints(cls, localns={}, include_extras=True)


def _convert(value: Any, hint: Any, key: str) -> Any:
    """Return `value` as the type `hint`, or raise the one line that says what it must be."""
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, key)
    try:
        return _match(value, hint)
    except _Mismatch:
        words = _describe(hint)
        message = f"{key} must be {words}, got {value!r}."
        if isinstance(value, str):
            message += did_you_mean(value, _literals(hint))
        elif isinstance(value, float) and value.is_integer() and _accepts(int(value), hint):
            message += f" Try {key}={int(value)}"
        elif limit := _exceeded(value, hint):
            message += f" Try at {'most' if limit > 0 else 'least'} {limit:.15g}"
        raise ConfigError(message.removesuffix(".")) from None


class _Mismatch(Exception):  # noqa: N818 (never leaves this file)
    """The value does not have the type."""


def _exceeded(value: Any, hint: Any) -> float | None:
    """The limit of a type, if a number is beyond it and else of the type."""
    if not isinstance(value, (int, float)):
        return None
    limits = [limit if value > 0 else -limit for limit in (LARGEST_FLOAT, LARGEST_INT, LARGEST_COUNT)]
    return next((limit for limit in limits if abs(value) > abs(limit) and _accepts(limit, hint)), None)


def _accepts(value: Any, hint: Any) -> bool:
    try:
        _match(value, hint)
    except _Mismatch:
        return False
    return True


def _match(value: Any, hint: Any) -> Any:
    """Convert without loss: an int is a float, a list is a tuple, a bool is never a number; numbers fit a tensor."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        value = _match(value, args[0])
        if all(rule.test(value) for rule in args[1:] if isinstance(rule, Rule)):
            return value
    elif origin in (typing.Union, types.UnionType):
        for option in args:
            if _accepts(value, option):
                return _match(value, option)
    elif origin is Literal:
        if any(value == option and type(value) is type(option) for option in args):
            return value
    elif origin in (list, tuple) and isinstance(value, (list, tuple)):
        if origin is list:
            return [_match(item, args[0]) for item in value]
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_match(item, args[0]) for item in value)
        if len(args) == len(value):
            return tuple(_match(item, arg) for item, arg in zip(value, args, strict=True))
    elif origin is dict and isinstance(value, Mapping):
        return {_match(name, args[0]): _match(item, args[1]) for name, item in value.items()}
    elif dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value)
    elif hint in (None, type(None)):
        if value is None:
            return None
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST_FLOAT:
            return float(value)
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_INT:
            return value
    elif inspect.isclass(hint) and isinstance(value, hint):
        return value
    raise _Mismatch


def _literals(hint: Any) -> list[str]:
    """All strings that a type with Literals names."""
    if typing.get_origin(hint) is Literal:
        return [value for value in typing.get_args(hint) if isinstance(value, str)]
    return [name for arg in typing.get_args(hint) for name in _literals(arg)]


def _describe(hint: Any) -> str:
    """A type in the user's words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        rules = [rule.words for rule in args[1:] if isinstance(rule, Rule)]
        return " and ".join(rules) or _describe(args[0])
    if origin in (typing.Union, types.UnionType):
        words = [_describe(arg) for arg in args if arg is not type(None)]
        return " or ".join([*words, "null"] if type(None) in args else words)
    if origin is Literal:
        names = [str(value) for value in args]
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    if origin in (list, tuple):
        items = [arg for arg in args if arg is not Ellipsis]
        if origin is list or len(items) < len(args):
            return f"a list of ({_describe(items[0])})"
        return f"a list of {len(items)} ({', '.join(_describe(item) for item in items)})"
    if origin is dict:
        return f"a section of ({_describe(args[1])})"
    names = {
        int: "an int",
        float: "a number",
        bool: "true or false",
        str: "a string",
        type(None): "null",
    }
    return names.get(hint, getattr(hint, "__name__", str(hint)))
