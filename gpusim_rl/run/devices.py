"""Devices and simulator of a run."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from gpusim_rl.env import Environment
from gpusim_rl.errors import ConfigError
from gpusim_rl.machine.hardware import has_compiler
from gpusim_rl.settings.schema import RunConfig
from gpusim_rl.settings.simulators import NO_SIMULATOR, SIMULATORS
from gpusim_rl.sim import SimChoice, choose_sim

logger = logging.getLogger("gpusim_rl.run")


def choose_devices(cfg: RunConfig, *, outside: type[Environment] | None = None) -> tuple[torch.device, SimChoice]:
    """Return the learner's device, and the simulator with its device; `outside` is the env class of another library."""
    rl_device = find_device(cfg.rl_device or cfg.device, "rl_device" if cfg.rl_device else "device")
    if outside is not None:
        device = rl_device if outside.on_learners_device else torch.device("cpu")
        if cfg.sim.name != "auto" or cfg.sim_device not in (None, "auto", device.type):
            raise ConfigError(f"sim and sim_device cannot be set for envs of {outside.library}, which step on {device}")
        return rl_device, SimChoice(NO_SIMULATOR, device, f"{outside.library}'s own")
    sim_device = find_device(cfg.sim_device or cfg.device, "sim_device" if cfg.sim_device else "device")
    if cfg.sim_device is None and cfg.sim.name != "auto" and SIMULATORS[cfg.sim.name].devices == ("cpu",):
        sim_device = torch.device("cpu")  # also for a learner on the GPU
    return rl_device, choose_sim(cfg.sim.name, sim_device)


def choose_eval_devices(cfg: RunConfig, *, outside: type[Environment] | None = None) -> tuple[torch.device, SimChoice]:
    """Choose the devices for evaluations during training: `eval_device` if set, else the CPU.

    Two processes on one GPU share its time, which halves the speed of training during an evaluation. If the user chose
    a simulator or `sim_device`, or the envs are another library's, the default is the training devices.
    """
    name = cfg.eval_device
    if name is None and outside is None and cfg.sim.name == "auto" and cfg.sim_device is None:
        name = "cpu"
    if name is not None:
        device = str(find_device(name, "eval_device"))
        cfg = replace(cfg, device=device, sim_device=None, rl_device=None)
    return choose_devices(cfg, outside=outside)


def find_device(name: str, key: str) -> torch.device:
    """Resolve a device name; raise ConfigError if this machine lacks the device."""
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    kind, _, number = name.partition(":")
    if kind == "cuda":
        count = torch.cuda.device_count()
        index = int(number) if number else torch.cuda.current_device() if count else 0  # torch.device wraps at 128
        if index >= count:
            problem = f"this machine has {count or 'no'} CUDA device{'s' * (count > 1)}"
            raise ConfigError(problem, key=f"{key}={name}", hint=f"Try {key}={'cuda:0' if count else 'cpu'}")
        return torch.device("cuda", index)
    return torch.device(name)


def set_deterministic(deterministic: bool) -> None:
    """Enable or disable torch's deterministic mode."""
    if deterministic != torch.are_deterministic_algorithms_enabled():  # the call imports torch's compiler
        torch.use_deterministic_algorithms(deterministic)


@dataclass(frozen=True, slots=True)
class CompileChoice:
    """torch.compile mode (`off`, `learner`, `all`, or `later` while it is undecided), and the reason for it."""

    mode: str
    reason: str
    since: int | None = None  # iteration after which the run switched to compiled code, with `auto`

    def __str__(self) -> str:
        return f"{'learner and control steps' if self.mode == 'all' else self.mode} ({self.reason})"

    @property
    def now(self) -> bool:
        """True if code is compiled from its first call."""
        return self.mode in ("learner", "all")


IN_BACKGROUND = ("cuda",)  # types of devices on which `auto` compiles


def choose_compile(
    cfg: RunConfig,
    device: torch.device,
    sim_device: torch.device,
    *,
    outside: type[Environment] | None = None,
    since: int | None = None,
) -> CompileChoice:
    """Choose the torch.compile mode: `cfg.compile`, reduced to what this machine supports; `off` for evaluations.

    `outside` is the env class of another library; `since`: iteration after which the resumed run was compiled, if any.
    """
    if cfg.test:
        return CompileChoice("off", "not used for evaluations")
    wanted, auto = cfg.compile, cfg.compile == "auto"
    rules = (
        (wanted == "off", "off", "as configured"),
        (auto and device.type not in IN_BACKGROUND, "off", "auto: not on CUDA"),
        (auto and sim_device != device, "off", f"auto: physics on {sim_device}"),
        (auto and cfg.torch_deterministic, "off", "auto: torch_deterministic=true"),
        (auto and cfg.multi_gpu, "off", "auto: multi_gpu=true"),
        (auto and cfg.actors.engine is not None, "off", "auto: actors step the envs"),
        (auto and outside is not None, "off", f"auto: {outside and outside.library} runs the control step"),
        (auto and cfg.debug.check_task, "off", "auto: debug.check_task reads every step"),
        (device.type == "cuda" and find_spec("triton") is None, "off", "torch.compile needs the triton package"),
        (not has_compiler(), "off", "torch.compile needs a C++ compiler"),
        (cfg.debug.check_task and wanted == "all", "learner", "debug.check_task reads every step"),
        (auto and since is not None, "all", f"auto: since iteration {since}"),
        (auto, "later", "auto: in the background, if the run takes minutes"),
        (True, wanted, "as configured"),
    )
    mode, reason = next((mode, reason) for holds, mode, reason in rules if holds)
    choice = CompileChoice(mode, reason, since if auto and mode == "all" else None)
    if not auto and wanted != mode:
        logger.warning("compile=%s is not available here; using %s", wanted, choice)
    if choice.now:
        logger.info("torch.compile compiles during the first iterations, which takes a minute or more the first time")
    return choice
