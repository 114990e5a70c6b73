"""Other libraries' trainers on our environments, one iteration at a time; `BASELINES` declares each library once.

A baseline does the same work as our PPO: same networks, horizon, epochs, minibatches, losses and schedules, as far as
the library supports them (`Baseline.settings`). It runs the library's loop, without checkpoints. Mode `same` keeps the
library's logging, in a temporary folder; mode `fastest` disables logging where possible.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import itertools
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from gpusim_rl.connect import LIBRARIES, require_library
from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError, did_you_mean
from gpusim_rl.learn.algorithm import choose_precision
from gpusim_rl.learn.minibatch import fit_minibatches
from gpusim_rl.machine.hardware import has_compiler
from gpusim_rl.settings.schema import PPOConfig, RunConfig

MODES: tuple[str, ...] = ("same", "fastest")

Around = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Library:
    """Library with its own PPO.

    Attributes:
        name: Name in `gpusim_rl.connect.LIBRARIES`.
        trainer: Trainer that runs the library's PPO on our environments.
        fastest: Description of the mode `fastest`.
    """

    name: str
    trainer: type[Baseline]
    fastest: str

    @property
    def installed(self) -> bool:
        """True if the library can be imported."""
        return importlib.util.find_spec(LIBRARIES[self.name][0]) is not None

    @property
    def distribution(self) -> str:
        """Name of the package on PyPI."""
        return LIBRARIES[self.name][1].partition("~")[0]


def find_library(name: str) -> Library:
    """Return one of `BASELINES`; raise ConfigError for an unknown name."""
    if name not in BASELINES:
        raise ConfigError(
            f"unknown baseline {name!r}.{did_you_mean(name, BASELINES)} Available: {', '.join(BASELINES)}"
        )
    return BASELINES[name]


def choose_baselines(asked: str) -> tuple[list[str], list[str]]:
    """Return the libraries to measure, and the libraries that are not installed.

    Args:
        asked: Names separated by commas, `none`, or `all` (the installed libraries).

    Raises:
        ConfigError: A name is unknown, or a requested library is not installed.
    """
    names = [] if asked == "none" else list(dict.fromkeys(name for name in asked.split(",") if name))
    wanted = list(BASELINES.values()) if asked == "all" else [find_library(name) for name in names]
    missing = [library.name for library in wanted if not library.installed]
    if missing and asked != "all":
        raise ConfigError(f"--baselines: not installed: {', '.join(missing)}. Try {install_command(missing)}")
    return [library.name for library in wanted if library.name not in missing], missing


def install_command(names: Sequence[str]) -> str:
    """Return the pip command that installs the libraries."""
    return " ".join(["pip install", *(f"'{LIBRARIES[name][1]}'" for name in names)])


def make_baseline(
    name: str, env: VecEnv, cfg: RunConfig, *, device: torch.device, mode: str = "same", bf16: bool = False
) -> Baseline:
    """Build another library's PPO with the settings of our PPO in `cfg`.

    Args:
        name: One of `BASELINES`.
        env: Environment; will be reset.
        cfg: Settings and seed of a run of our PPO.
        device: Device of the learner.
        mode: `same`: compiled only if `compile` is set. `fastest`: the library's fastest documented mode on this device
            (compiled, 16-bit, tf32 on CUDA, no log), without `max-autotune`.
        bf16: With `same`: use 16-bit networks, if the library supports them.

    Raises:
        ConfigError: Unknown name or mode, a missing library, or a policy that only our PPO can train.
    """
    library = find_library(name)
    if mode not in MODES:
        raise ConfigError(f"unknown mode {mode!r}.{did_you_mean(mode, MODES)} Available: {', '.join(MODES)}")
    if not isinstance(cfg.algorithm, PPOConfig):
        raise ConfigError("baselines support only PPO: try algo=ppo")
    network = cfg.algorithm.network
    if network.rnn is not None or network.state_dependent_std:
        key = "state_dependent_std=true" if network.rnn is None else f"rnn={network.rnn}"
        raise ConfigError(f"baselines require feed-forward policies and a state-independent std, got ppo.network.{key}")
    with _process_settings_kept(), _quiet():
        require_library(name, f"baseline {name}")
        return library.trainer(library, env, cfg, device, mode, bf16)


class Baseline:
    """Another library's trainer on one of our environments.

    Attributes:
        name: One of `BASELINES`.
        version: Version of the library.
        mode: One of `MODES`.
        settings: Effective settings as plain values: precision, compile, trunk, minibatches, schedule, notes, ...
        env_steps_per_iteration: Control steps per iteration, summed over envs.
    """

    def __init__(
        self, library: Library, env: VecEnv, cfg: RunConfig, device: torch.device, mode: str, bf16: bool
    ) -> None:
        self.name, self.mode = library.name, mode
        self.version = importlib.metadata.version(library.distribution)
        self._ppo: PPOConfig = cfg.algorithm
        self.env_steps_per_iteration = cfg.num_envs * self._ppo.horizon
        self.settings: dict[str, Any] = {}
        self._cfg = cfg
        self._device = device
        self._half = bf16 if mode == "same" else choose_precision("auto", device)[0] != "fp32"
        self._compile = cfg.compile in ("learner", "all") if mode == "same" else has_compiler()
        self._minibatches = fit_minibatches(
            self.env_steps_per_iteration, self.env_steps_per_iteration / self._ppo.minibatch_size
        )
        self._folder = tempfile.TemporaryDirectory()
        self._around: list[Around] = []
        self._open_phase = ExitStack()
        if cfg.seed != -1:
            torch.manual_seed(cfg.seed)
        Distribution.set_default_validate_args(True)  # torch's default, regardless of earlier imports
        if mode == "fastest" and device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # tf32, which rl_games always uses
        self._build(env)
        self._process_settings = _ProcessSettings.now()

    def _build(self, env: VecEnv) -> None:
        raise NotImplementedError

    def _iterate(self) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def iterate(self) -> None:
        """Run one PPO iteration: a rollout of `ppo.horizon` steps in all envs, then the update."""
        with _process_settings_kept(), _quiet():
            self._process_settings.apply()
            try:
                self._iterate()
            finally:
                self._leave()

    def observe(self, around: Around) -> None:
        """Enter `around("rollout")` and `around("update")` around these phases, like `PhaseTimer.observe`.

        Both exclude the library's logging.
        """
        self._around.append(around)

    def close(self) -> None:
        """Remove the library's files; the environment stays open."""
        self._close()
        self._folder.cleanup()

    def _enter(self, phase: str) -> None:
        """End the current phase and start another."""
        self._leave()
        for around in self._around:
            self._open_phase.enter_context(around(phase))

    def _leave(self) -> None:
        self._open_phase.close()

    def _as_phase(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its calls count as a phase."""

        def observed(*args: Any, **kwargs: Any) -> Any:
            self._enter(phase)
            try:
                return call(*args, **kwargs)
            finally:
                self._leave()

        return observed

    def _describe(self, *, precision: str, compiled: str, trunk: str, schedule: str, **more: Any) -> None:
        ppo = self._ppo
        self.settings = {
            "device": str(self._device),
            "precision": precision,
            "matmul_precision": torch.get_float32_matmul_precision(),
            "compile": compiled,
            "trunk": trunk,
            "hidden": list(ppo.network.hidden),
            "activation": ppo.network.activation,
            "horizon": ppo.horizon,
            "epochs": ppo.epochs,
            "minibatches": self._minibatches,
            "schedule": schedule,
            "log": "TensorBoard",
            **more,
        }

    @property
    def _logs(self) -> bool:
        return self.mode == "same"

    @property
    def _grad_norm(self) -> float:
        return math.inf if self._ppo.max_grad_norm is None else self._ppo.max_grad_norm


class _RslRl(Baseline):
    def _build(self, env: VecEnv) -> None:
        from rsl_rl.modules import GaussianDistribution
        from rsl_rl.runners import OnPolicyRunner

        from gpusim_rl.connect.rsl_rl import RslRlEnv

        ppo, net = self._ppo, self._ppo.network
        adaptive = ppo.schedule == "adaptive"
        model = {
            "class_name": "MLPModel",
            "hidden_dims": list(net.hidden),
            "activation": {"silu": "swish"}.get(net.activation, net.activation),
            "obs_normalization": ppo.normalize_obs,
        }
        distribution = {
            "class_name": GaussianDistribution,
            "init_std": math.exp(net.log_std_init),
            "std_range": (math.exp(net.log_std_min), math.exp(net.log_std_max)),
            "std_type": "log",
        }
        adapter = RslRlEnv(env, reward_scale=ppo.reward_scale)
        settings = {
            "num_steps_per_env": ppo.horizon,
            "save_interval": 2**31,
            "check_for_nan": self.mode == "same",
            "obs_groups": {"actor": ["policy"], "critic": ["critic" if "critic" in env.obs_sizes else "policy"]},
            "torch_compile_mode": "default" if self._compile else None,
            "actor": {**model, "distribution_cfg": distribution},
            "critic": model,
            "algorithm": {
                "class_name": "PPO",
                "num_learning_epochs": ppo.epochs,
                "num_mini_batches": self._minibatches,
                "clip_param": ppo.clip,
                "gamma": ppo.gamma,
                "lam": ppo.gae_lambda,
                "value_loss_coef": 0.5 * ppo.value_coef,
                "entropy_coef": ppo.entropy_coef,
                "learning_rate": ppo.learning_rate,
                "max_grad_norm": self._grad_norm,
                "use_clipped_value_loss": ppo.value_clip,
                "schedule": "adaptive" if adaptive else "fixed",
                "desired_kl": ppo.kl_threshold,
                "use_mixed_precision": self._half,
            },
        }
        log_dir = self._folder.name if self._logs else None
        self._runner: Any = OnPolicyRunner(adapter, settings, log_dir=log_dir, device=str(self._device))
        self._runner.alg.update = self._as_phase("update", self._runner.alg.update)
        # learn() is called once per iteration, so work before and after its loop is done once here, or skipped.
        self._runner.logger.init_logging_writer()
        self._runner.logger.init_logging_writer = _nothing
        self._runner.save = _nothing
        self._describe(
            precision="bf16 in the update" if self._half else "fp32",
            compiled=str(settings["torch_compile_mode"] or "no"),
            trunk="separate",
            schedule="adaptive per minibatch" if adaptive else "constant",
            optimizer="Adam",
            normalize_value=False,
            check_for_nan=settings["check_for_nan"],
            log="TensorBoard" if self._logs else "none",
            notes=["actor and critic cannot share a trunk", "no value normalisation", "no bounds loss"],
        )

    def _iterate(self) -> None:
        self._enter("rollout")  # until the update begins
        self._runner.learn(1)
        self._runner.current_learning_iteration += 1

    def _close(self) -> None:
        if self._logs:
            self._runner.logger.writer.close()


class _RlGames(Baseline):
    def _build(self, env: VecEnv) -> None:
        from rl_games.torch_runner import Runner

        from gpusim_rl.connect.rl_games import register

        ppo = self._ppo
        bf16 = self._half and self._device.type == "cuda"
        adaptive = ppo.schedule == "adaptive"
        self._env_name = f"baseline {id(self)}"
        register(env, self._env_name, device=self._device)
        central = "critic" in env.obs_sizes
        runner = Runner()
        runner.load({"params": self._params(central, bf16)})
        # Same as runner.run_train(), but keeps a reference to the agent.
        self._agent = agent = runner.algo_factory.create(runner.algo_name, base_name="run", params=runner.params)
        # reduce-overhead replays CUDA graphs
        compile_mode = "reduce-overhead" if self.mode == "fastest" and self._device.type == "cuda" else "default"
        if self._compile:
            agent.model = torch.compile(agent.model, mode=compile_mode)
            if central:
                agent.central_value_net.model = torch.compile(agent.central_value_net.model, mode=compile_mode)
        self._begun = False
        self._next_epoch = agent.update_epoch
        agent.update_epoch = self._one_epoch
        agent.play_steps = self._as_phase("rollout", agent.play_steps)
        self._prepare_dataset = agent.prepare_dataset
        agent.prepare_dataset = self._begin_update
        agent.train_epoch = self._until_phase_ends(agent.train_epoch)
        self._describe(
            precision="bf16 in the update" if bf16 else "fp32",
            compiled=compile_mode if self._compile else "no",
            trunk="separate" if central or ppo.network.separate else "shared",
            schedule=f"adaptive per {ppo.schedule_per}" if adaptive else "constant",
            optimizer="fused Adam",
            normalize_value=ppo.normalize_value,
            notes=["16-bit networks on CUDA only", "minibatches are not shuffled", "its log cannot be turned off"],
        )

    def _params(self, central: bool, bf16: bool) -> dict[str, Any]:
        ppo, net = self._ppo, self._ppo.network
        mlp = {
            "units": list(net.hidden),
            "activation": {"silu": "swish"}.get(net.activation, net.activation),
            "initializer": {"name": "default"},
        }
        shared = {
            "minibatch_size": self.env_steps_per_iteration // self._minibatches,
            "mini_epochs": ppo.epochs,
            "learning_rate": ppo.learning_rate,
            "clip_value": ppo.value_clip,
            "normalize_input": ppo.normalize_obs,
            "truncate_grads": ppo.max_grad_norm is not None,
            "grad_norm": self._grad_norm,
            "mixed_precision": bf16,
        }
        config = {
            **shared,
            "name": "baseline",
            "env_name": self._env_name,
            "device": str(self._device),
            "num_actors": self._cfg.num_envs,
            "train_dir": self._folder.name,
            "save_best_after": 2**31,
            "reward_shaper": {"scale_value": ppo.reward_scale},
            "horizon_length": ppo.horizon,
            "gamma": ppo.gamma,
            "tau": ppo.gae_lambda,
            "lr_schedule": "adaptive" if ppo.schedule == "adaptive" else None,
            "schedule_type": "legacy" if ppo.schedule_per == "minibatch" else "standard",
            "kl_threshold": ppo.kl_threshold,
            "e_clip": ppo.clip,
            "critic_coef": ppo.value_coef,
            "entropy_coef": ppo.entropy_coef,
            "bounds_loss_coef": ppo.bounds_coef,
            "normalize_advantage": ppo.normalize_advantage,
            "normalize_value": ppo.normalize_value,
            "value_bootstrap": True,
            "clip_actions": False,  # the environment clips
        }
        if central:
            network = {"name": "actor_critic", "central_value": True, "mlp": mlp}
            config["central_value_config"] = {**shared, "network": network, "e_clip": ppo.clip}
        return {
            "seed": None if self._cfg.seed == -1 else self._cfg.seed,
            "torch_threads": 0,  # same as all other trainers
            "algo": {"name": "a2c_continuous"},
            "model": {"name": "continuous_a2c_logstd"},
            "network": {
                "name": "actor_critic",
                "separate": net.separate,
                "mlp": mlp,
                "space": {
                    "continuous": {
                        "mu_activation": "None",
                        "sigma_activation": "None",
                        "mu_init": {"name": "default"},
                        "sigma_init": {"name": "const_initializer", "val": net.log_std_init},
                        "fixed_sigma": True,
                    }
                },
            },
            "config": config,
        }

    def _one_epoch(self) -> int:
        if self._stop:
            raise _Pause
        self._stop = True
        return self._next_epoch()

    def _begin_update(self, *args: Any) -> None:
        self._enter("update")
        self._prepare_dataset(*args)

    def _until_phase_ends(self, train_epoch: Callable[[], Any]) -> Callable[[], Any]:
        def train() -> Any:
            try:
                return train_epoch()
            finally:
                self._leave()

        return train

    def _iterate(self) -> None:
        self._stop = False
        with suppress(_Pause):
            self._agent.train()
        if not self._begun:  # train() continues where it stopped
            self._begun = True
            self._agent.init_tensors = _nothing
            self._agent.env_reset = lambda: self._agent.obs

    def _close(self) -> None:
        from rl_games.common import env_configurations, vecenv

        self._agent.writer.close()
        for known in (vecenv.vecenv_config, env_configurations.configurations):
            del known[self._env_name]


class _Skrl(Baseline):
    def _build(self, env: VecEnv) -> None:
        from skrl.agents.torch.ppo import PPO
        from skrl.memories.torch import RandomMemory
        from skrl.resources.preprocessors.torch import RunningStandardScaler
        from skrl.resources.schedulers.torch import KLAdaptiveLR
        from skrl.trainers.torch import SequentialTrainer

        from gpusim_rl.connect.skrl import SkrlEnv

        Distribution.set_default_validate_args(False)  # as skrl does when first imported
        ppo = self._ppo
        adapter = SkrlEnv(env, device=self._device)
        adaptive = ppo.schedule == "adaptive"
        where: dict[str, Any] = {"device": self._device}
        spaces = {
            "observation_space": adapter.observation_space,
            "state_space": adapter.state_space,
            "action_space": adapter.action_space,
            **where,
        }
        central = adapter.state_space is not None
        models = self._models(spaces, central)
        cfg: dict[str, Any] = {
            "rollouts": ppo.horizon,
            "learning_epochs": ppo.epochs,
            "mini_batches": self._minibatches,
            "discount_factor": ppo.gamma,
            "gae_lambda": ppo.gae_lambda,
            "learning_rate": ppo.learning_rate,
            "grad_norm_clip": ppo.max_grad_norm or 0.0,
            "ratio_clip": ppo.clip,
            "value_clip": ppo.clip if ppo.value_clip else 0.0,
            "entropy_loss_scale": ppo.entropy_coef,
            "value_loss_scale": 0.5 * ppo.value_coef,
            "time_limit_bootstrap": True,
            "rewards_shaper": lambda rewards, timestep, timesteps: rewards * ppo.reward_scale,
            "mixed_precision": self._half,
            "experiment": {
                "directory": self._folder.name,
                "write_interval": ppo.horizon if self._logs else 0,
                "checkpoint_interval": 0,
            },
        }
        if adaptive:
            cfg["learning_rate_scheduler"] = KLAdaptiveLR
            cfg["learning_rate_scheduler_kwargs"] = {
                "kl_threshold": ppo.kl_threshold,
                "min_lr": ppo.learning_rate_min,
                "max_lr": ppo.learning_rate_max,
            }
        if ppo.normalize_obs:
            clip = {"clip_threshold": ppo.clip_obs, **where}
            cfg["observation_preprocessor"] = RunningStandardScaler
            cfg["observation_preprocessor_kwargs"] = {"size": adapter.observation_space, **clip}
            if central:
                cfg["state_preprocessor"] = RunningStandardScaler
                cfg["state_preprocessor_kwargs"] = {"size": adapter.state_space, **clip}
        if ppo.normalize_value:
            cfg["value_preprocessor"] = RunningStandardScaler
            cfg["value_preprocessor_kwargs"] = {"size": 1, **where}
        memory = RandomMemory(memory_size=ppo.horizon, num_envs=env.num_envs, **where)
        self._agent = PPO(models=models, memory=memory, cfg=cfg, **spaces)
        self._agent.update = self._as_phase("update", self._agent.update)
        trainer = {
            "timesteps": ppo.horizon,
            "headless": True,
            "disable_progressbar": True,
            "close_environment_at_exit": False,
        }
        self._trainer = SequentialTrainer(env=adapter, agents=self._agent, cfg=trainer)
        half = "fp16 (autocast's default)" if self._device.type == "cuda" else "bf16"
        self._describe(
            precision=half if self._half else "fp32",
            compiled="no",
            trunk="separate" if models["policy"] is not models["value"] else "shared",
            schedule="adaptive per epoch" if adaptive else "constant",
            optimizer="Adam",
            normalize_value=ppo.normalize_value,
            log="TensorBoard" if self._logs else "none",
            notes=["no torch.compile", "no bounds loss", "the value loss uses only the clipped value"],
        )

    def _models(self, spaces: dict[str, Any], central: bool) -> dict[str, Any]:
        from skrl.utils.model_instantiators.torch import deterministic_model, gaussian_model, shared_model

        models: dict[str, Any]
        net = self._ppo.network
        if net.activation in ("silu", "gelu"):
            raise ConfigError(
                f"skrl's models support elu, relu, tanh and selu, got ppo.network.activation={net.activation}"
            )
        layers = {"name": "net", "layers": list(net.hidden), "activations": net.activation}
        std = {
            "initial_log_std": net.log_std_init,
            "min_log_std": net.log_std_min,
            "max_log_std": net.log_std_max,
        }
        policy = {"network": [{**layers, "input": "OBSERVATIONS"}], "output": "ACTIONS", **std}
        value = {"network": [{**layers, "input": "STATES" if central else "OBSERVATIONS"}], "output": "ONE"}
        roles = ["policy", "value"]
        if central or net.separate:
            models = {"policy": gaussian_model(**policy, **spaces), "value": deterministic_model(**value, **spaces)}
        else:
            models = dict.fromkeys(roles, shared_model(roles=roles, parameters=[policy, value], **spaces))
        for role in roles:
            models[role].init_state_dict(role=role)
        return models

    def _iterate(self) -> None:
        self._enter("rollout")  # until the update begins
        self._trainer.train()

    def _close(self) -> None:
        if self._logs:
            self._agent.writer.close()


class _Sb3(Baseline):
    def _build(self, env: VecEnv) -> None:
        from stable_baselines3 import PPO
        from stable_baselines3.common.vec_env import VecNormalize

        from gpusim_rl.connect.sb3 import Sb3Env

        ppo = self._ppo
        adapter: Any = Sb3Env(env, reward_scale=ppo.reward_scale)
        if ppo.normalize_obs:
            adapter = VecNormalize(adapter, norm_reward=False, clip_obs=ppo.clip_obs)
        fused = self.mode == "fastest"
        if fused:  # SB3's documentation: a policy without convolutions is faster on the CPU
            self._device = torch.device("cpu")
        self._model = PPO(
            "MlpPolicy",
            adapter,
            learning_rate=ppo.learning_rate,
            n_steps=ppo.horizon,
            batch_size=self.env_steps_per_iteration // self._minibatches,
            n_epochs=ppo.epochs,
            gamma=ppo.gamma,
            gae_lambda=ppo.gae_lambda,
            clip_range=ppo.clip,
            clip_range_vf=ppo.clip if ppo.value_clip else None,
            normalize_advantage=ppo.normalize_advantage,
            ent_coef=ppo.entropy_coef,
            vf_coef=0.5 * ppo.value_coef,
            max_grad_norm=self._grad_norm,
            policy_kwargs={**self._network(), "optimizer_kwargs": {"eps": 1e-5, "fused": fused}},
            device=self._device,
        )
        self._model.collect_rollouts = self._as_phase("rollout", self._model.collect_rollouts)
        self._model.train = self._as_phase("update", self._model.train)
        self._describe(
            precision="fp32",
            compiled="no",
            trunk="separate" if ppo.network.separate else "shared",
            schedule="constant",
            optimizer="fused Adam" if fused else "Adam",
            normalize_value=False,
            log="in memory" if self._logs else "none",
            notes=[
                "no 16-bit networks, torch.compile, adaptive learning rate, value normalisation or bounds loss",
                "the environment returns numpy arrays",
                "the value loss uses only the clipped value",
            ],
        )

    def _network(self) -> dict[str, Any]:
        from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

        net = self._ppo.network
        activation = {"elu": nn.ELU, "relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU, "gelu": nn.GELU}
        activation = activation.get(net.activation, nn.SELU)
        if net.separate:
            return {"net_arch": list(net.hidden), "activation_fn": activation, "log_std_init": net.log_std_init}

        class SharedTrunk(BaseFeaturesExtractor):
            """Shared layers of actor and critic."""

            def __init__(self, observation_space: Any) -> None:
                super().__init__(observation_space, features_dim=net.hidden[-1])
                sizes = [*observation_space.shape, *net.hidden]
                layers = [(nn.Linear(*pair), activation()) for pair in itertools.pairwise(sizes)]
                self.net = nn.Sequential(*(module for pair in layers for module in pair))

            def forward(self, obs: Tensor) -> Tensor:
                return self.net(obs)

        return {"net_arch": [], "features_extractor_class": SharedTrunk, "log_std_init": net.log_std_init}

    def _iterate(self) -> None:
        interval: Any = 1 if self._logs else None
        self._model.learn(self.env_steps_per_iteration, reset_num_timesteps=False, log_interval=interval)

    def _close(self) -> None:
        self._model.logger.close()


class _Pause(Exception):  # noqa: N818 - not an error
    """Exception that exits rl_games' endless loop between two epochs."""


def _nothing(*args: Any, **kwargs: Any) -> None:
    """No-op replacement for a library's per-call overhead."""


BASELINES: dict[str, Library] = {
    library.name: library
    for library in (
        Library("rsl_rl", _RslRl, "compiled, 16-bit update, no NaN check, no log"),
        Library("skrl", _Skrl, "16-bit, no log"),
        Library("rl_games", _RlGames, "compiled, 16-bit update on CUDA"),
        Library("sb3", _Sb3, "on the CPU, fused Adam, no log"),
    )
}


@dataclass(frozen=True)
class _ProcessSettings:
    """Process-wide settings that libraries change for speed, stored per baseline."""

    validate: bool
    matmul_precision: str
    threads: int

    @classmethod
    def now(cls) -> _ProcessSettings:
        return cls(Distribution._validate_args, torch.get_float32_matmul_precision(), torch.get_num_threads())

    def apply(self) -> None:
        Distribution.set_default_validate_args(self.validate)
        torch.set_float32_matmul_precision(self.matmul_precision)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)


@contextmanager
def _process_settings_kept() -> Iterator[None]:
    before = _ProcessSettings.now()
    try:
        yield
    finally:
        before.apply()


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def _quiet() -> Iterator[None]:
    nowhere = _Nowhere()
    with redirect_stdout(nowhere), redirect_stderr(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
