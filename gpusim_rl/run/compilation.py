"""Choice of the code to compile with torch.compile."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from gpusim_rl.machine.hardware import has_compiler
from gpusim_rl.settings.schema import RunConfig

logger = logging.getLogger("gpusim_rl.run")


@dataclass(frozen=True, slots=True)
class CompileChoice:
    """Mode of torch.compile (`off`, `learner` or `all`), and the reason."""

    mode: str
    reason: str

    def __str__(self) -> str:
        return f"{'learner and control steps' if self.mode == 'all' else self.mode} ({self.reason})"


def choose_compile(cfg: RunConfig, device: torch.device) -> CompileChoice:
    """Choose the torch.compile mode: `cfg.compile`, reduced to what this machine supports; `off` for evaluations."""
    if cfg.test:
        return CompileChoice("off", "an evaluation")
    rules = (
        (cfg.compile == "off", "off", "as configured"),
        (device.type == "cuda" and find_spec("triton") is None, "off", "torch.compile needs the package triton"),
        (cfg.compile != "off" and not has_compiler(), "off", "torch.compile needs a C++ compiler"),
        (cfg.debug.check_task and cfg.compile == "all", "learner", "debug.check_task reads every step"),
        (True, cfg.compile, "as configured"),
    )
    choice = next(CompileChoice(mode, reason) for holds, mode, reason in rules if holds)
    if cfg.compile != choice.mode:
        logger.warning("compile=%s is limited to: %s", cfg.compile, choice)
    if choice.mode != "off":
        logger.info("torch.compile compiles during the first iterations, for a minute or more on the first start")
    return choice
