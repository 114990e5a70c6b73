"""Command line of a hyperparameter search (`gpusim-rl tune`), and its search space in yaml."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from gpusim_rl.errors import ConfigError, closest
from gpusim_rl.files import paths
from gpusim_rl.files.safe_open import refuse_link, refuse_links
from gpusim_rl.settings.checks import algorithm_settings_class, build, check_settings
from gpusim_rl.settings.compose import compose
from gpusim_rl.settings.discover import read_yaml, tasks
from gpusim_rl.settings.overrides import key_of, value_of
from gpusim_rl.settings.schema import ALGORITHMS, Count, Positive, Rule, RunConfig, declarations

SPACES = Path(__file__).parent / "spaces"

Space = Mapping[str, Mapping[str, Any]]  # `low` and `high` of each setting, optionally with `log`; or its `choices`


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """Settings of a search; other keys of its command line are settings of the training runs."""

    method: Literal["optuna", "asha", "pbt"] = "optuna"
    trials: Count = 20  # size of the study; with pbt all trials run at once
    pruner: Literal["hyperband", "median", "none"] = "hyperband"  # optuna: early stopping
    # Iterations before asha may stop a trial, or between two changes by pbt. 0: a ninth of a training run
    grace: Annotated[int, Rule("an int >= 0", lambda value: value >= 0)] = 0
    reduction: Annotated[float, Rule("a number above 1", lambda value: value > 1)] = 3.0  # asha: keeps 1/reduction
    study: str = ""  # name; a search with the same name and folder continues the study
    space: str = ""  # yaml file; empty: the algorithm's default space
    stall_s: Positive = 600.0  # timeout for a new row of metrics [s]


@dataclass(frozen=True)
class Search:
    """Search as specified on the command line."""

    cfg: SearchConfig  # with resolved `study` and `grace`
    space: Space
    overrides: Sequence[str]  # of `train.py`, shared by all trials
    config_dir: Path | None  # folder of -cd
    device: str  # `device` of the training runs
    iterations: int  # max_iterations
    folder: Path  # database and tables; run folders are next to it

    def runs_of(self, number: int) -> Path:
        """Return the folder that contains a trial's run folders."""
        return self.folder.parent / f"{self.cfg.study}.{number:04d}"

    def refuse_links(self) -> None:
        """Raise ConfigError if a folder of study or trials contains links (except `latest`) or special files."""
        trials = self.folder.parent.glob(f"{self.cfg.study}.[0-9]*")
        for folder in (path for path in (self.folder, *trials) if os.path.lexists(path)):
            refuse_link(folder)
            refuse_links(folder, skipped=() if folder == self.folder else ("latest", ".latest-"))


def read_search(words: Sequence[str], config_dir: Path | None = None) -> Search:
    """Read and check a command line of `gpusim-rl tune`."""

    def number(text: str) -> Any:
        for read in (int, float, ast.literal_eval):  # `08` is not a Python literal
            with suppress(ValueError, SyntaxError):
                return read(text)
        return text

    for word in words:
        if "=" not in word:
            raise ConfigError(expected="key=value", got=word)
    fields = {field.name: field.type for field in dataclasses.fields(SearchConfig)}
    overrides = [word for word in words if key_of(word) not in fields]
    run_fields = {field.name for field in dataclasses.fields(RunConfig)}
    for key in map(key_of, overrides):  # suggest settings of the search, which training runs do not have
        if "." not in key and key not in run_fields and (near := closest(key, list(fields), 0.75)):
            raise ConfigError(f"unknown key {key!r}", hint=f"Did you mean {near!r}?")
    texts = {key_of(word): value_of(word) for word in words if key_of(word) in fields}
    cfg = build(SearchConfig, {key: text if fields[key] == "str" else number(text) for key, text in texts.items()})
    config = compose(overrides, config_dir)
    algo, iterations = check_settings(config)["algo"], int(config["max_iterations"])
    if cfg.grace > iterations:
        raise ConfigError(key="grace", expected=f"at most max_iterations={iterations}", got=cfg.grace)
    grace = cfg.grace or max(1, iterations // 9)
    if cfg.method == "pbt":  # changes need a row of metrics and a checkpoint
        grace = -(-grace // config["log"]["interval"]) * config["log"]["interval"]
    task = next((value_of(word) for word in overrides if key_of(word) == "task"), "Cartpole")
    study = cfg.study or f"{task}-{algo}{'' if cfg.method == 'optuna' else f'-{cfg.method}'}"
    if study in tasks(config_dir, outside=True):
        raise ConfigError("clashes with a task's run folder", key=f"study={study}", hint=f"Try study={study}-1")
    if not re.fullmatch(r"[\w-][\w.-]*", study):
        raise ConfigError(key="study", expected="a folder name with only A-Z a-z 0-9 . _ -", got=study)
    space = _read_space(cfg.space, algo, overrides, config_dir)
    if cfg.method == "pbt":
        _refuse_structure(space, config["algo"])
    return Search(
        cfg=dataclasses.replace(cfg, study=study, grace=grace),
        space=space,
        overrides=overrides,
        config_dir=config_dir,
        device=config["device"],
        iterations=iterations,
        folder=Path(config["log"]["dir"]) / study,
    )


def _read_space(name: str, algo: str, overrides: Sequence[str], config_dir: Path | None) -> Space:
    """Read a search space; check both ends of every range."""
    file = Path(name) if name else SPACES / f"{algo}.yaml"
    if not file.is_file():
        hint = f"Try space=<yaml>, such as {paths.from_here(SPACES / 'ppo.yaml')}"
        raise ConfigError("no such file" if name else f"no search space for {algo}", key=f"space={file}", hint=hint)
    space = read_yaml(file)
    if not space:
        raise ConfigError(key=str(file), expected="settings, each with low and high, or with choices", got=space)
    for key, allowed in space.items():
        section = key.partition(".")[0]
        if section in ALGORITHMS and section != algo:
            raise ConfigError(f"not a setting of algo={algo}", key=f"{file}: {key}", hint=f"Try algo={section}")
        for end in _ends(allowed, f"{file}: {key}"):
            try:
                check_settings(compose([*overrides, f"{key}={end}"], config_dir))
            except ConfigError as error:
                raise error.within(str(file)) from None
    return space


def _refuse_structure(space: Space, algo: Mapping[str, Any]) -> None:
    """Refuse settings that change shapes, since trials of a population exchange checkpoints."""
    from gpusim_rl.learn.algorithm import load_algorithm_class  # imports torch

    config = algorithm_settings_class(algo["name"], load_algorithm_class(algo["_target_"]))
    fixed = ["num_envs", *(f"{algo['name']}.{name}" for name in declarations(config).structure)]
    for key in space:
        if any(f"{key}.".startswith(f"{name}.") for name in fixed):
            raise ConfigError(f"cannot tune {key}: trials share checkpoints", key="method=pbt", hint="Try method=asha")


def _ends(allowed: Any, where: str) -> list[Any]:
    """Return the values to check: choices, or both ends of a range."""
    match allowed:
        case {"choices": [_, _, *_] as choices, **others} if not others:
            if all(isinstance(choice, int | float | str) for choice in choices):
                return [*choices]
        case {"low": int() | float() as low, "high": int() | float() as high, **others} if others.keys() <= {"log"}:
            if low < high and (low > 0 or not others.get("log")):
                return [low, high]
            raise ConfigError(key=where, expected="low < high, and low > 0 with log: true", got=allowed)
    raise ConfigError(key=where, expected="{low: a, high: b} or {choices: [a, b]}", got=allowed)
