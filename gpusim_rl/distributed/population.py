"""Population-based training (Jaderberg et al. 2017, arXiv 1711.09846): the worst copy the best, and change settings.

A member is a usual run. After every `interval` control steps it writes a record, a small json, and a checkpoint into
the folder of the population, and reads those of the others. There is no server and no lock: a record names the digest
of its checkpoint, which is written first, and what is torn is left out. Copying happens inside the process of the
member: weights are loaded and settings written in place. So CUDA graphs stay valid, and nothing starts again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gpusim_rl.distributed.trial_run import POLL_S, end
from gpusim_rl.distributed.tuning import find_space, split_words
from gpusim_rl.errors import ConfigError, warn
from gpusim_rl.files import paths
from gpusim_rl.files.safe_open import dump_yaml, load_json, load_yaml, lock, replacing
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.overrides import key_of, quote
from gpusim_rl.settings.schema import RunSpec

if TYPE_CHECKING:
    from gpusim_rl.run.log_interval import LogRow
    from gpusim_rl.run.logger import Logger
    from gpusim_rl.run.trainer import Trainer

OWN = {
    "method": "pbt",
    "population": "8",
    "interval": "1e7",
    "start_after": "1e7",
    "initial_delay": "2e7",
    "worst": "0.125",
    "best": "0.3",
    "better_std": "0.5",
    "better_share": "0.05",
    "inherit": "0.5",
    "mutate": "0.15",
    "keep": "25",
    "objective": "episode/trimmed_return",
    "study": "",
    "space": "",
    "members": "",
    "restarts": "3",
    "stall_s": "600",
}
"""Settings of a population and their defaults, as in DexPBT (Petrenko et al. 2023, arXiv 2305.12127)."""
OUTLIERS = 0.2
"""Share of the scores, the worst, that the standard deviation leaves out."""
FACTOR, FACTOR_OF_GAMMA = (1.1, 1.5), (1.1, 1.2)
"""A mutation multiplies or divides by a number in this range: a value, or 1 - gamma."""
RECORD = re.compile(r"m(\d+)-(\d+)\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What all members of a population share; `population.yaml` in its folder."""

    population: int  # members
    interval: int  # control steps, over all envs of a member, between two records
    start_after: int  # control steps for which a member that has changed is left alone
    initial_delay: int  # control steps before any member may change
    worst: float  # part of the members that may change
    best: float  # part of the members that are copied
    better_std: float  # what is copied is better by so many standard deviations of the scores,
    better_share: float  # and by this share of its own score
    inherit: float  # chance of taking over the settings with the weights
    mutate: float  # chance for each setting
    keep: int  # checkpoints of each member in the folder, the newest
    objective: str  # column of metrics.csv
    space: dict[str, Any]  # as tuning reads it


@dataclass(frozen=True, slots=True)
class Record:
    """What a member was when a generation ended."""

    member: int
    generation: int
    iteration: int
    env_steps: int
    objective: float | None
    """Best of the generation; None where there was no finite one, which counts as the worst."""
    settings: dict[str, Any]
    parent: tuple[int, int]
    """Member and generation whose weights it began the generation with."""
    seed: int
    checkpoint: str
    digest: str

    @property
    def name(self) -> str:
        """Of its file."""
        return f"m{self.member:02d}-{self.generation:06d}.json"

    @property
    def score(self) -> float:
        """What members are ranked by."""
        return -math.inf if self.objective is None else self.objective


# The rules: pure functions


def decide(own: Record, others: Sequence[Record], rules: Rules, chance: random.Random) -> tuple[Record, dict[str, Any]]:
    """What a member goes on with.

    Args:
        own: It.
        others: The newest record of each other member that is not ahead of it.
        rules: Of the population.
        chance: What draws.

    Returns:
        Whose weights (`own` for its own), and the settings.
    """
    ranked = sorted([own, *others], key=lambda record: (-record.score, record.member))
    scores = [record.score for record in ranked if record.objective is not None]
    if len(scores) < max(2.0, 0.5 * rules.population) or own not in ranked[-_part(rules.worst, ranked) :]:
        return own, own.settings
    donor = chance.choice(ranked[: min(_part(rules.best, ranked), len(scores))])
    spread = statistics.pstdev(scores[: len(scores) - int(OUTLIERS * len(scores))])
    gain = donor.score - own.score
    settings = own.settings
    if gain > rules.better_std * spread and gain > rules.better_share * abs(donor.score):
        settings = donor.settings if chance.random() < rules.inherit else own.settings
    else:
        donor = own
    return donor, mutated(settings, rules.space, rules.mutate, chance)


def _part(share: float, records: Sequence[Record]) -> int:
    return max(1, math.ceil(share * len(records) - 1e-9))


def mutated(
    settings: Mapping[str, Any], space: Mapping[str, Any], rate: float, chance: random.Random
) -> dict[str, Any]:
    """Settings of which some, each with the chance `rate`, are others: a factor up or down, or the choice beside it."""
    result = dict(settings)
    for key, what in space.items():
        if chance.random() >= rate:
            continue
        up = chance.random() < 0.5
        if "choices" in what:
            choices = what["choices"]
            place = choices.index(result[key]) + (1 if up else -1) if result[key] in choices else 0
            result[key] = choices[min(max(place, 0), len(choices) - 1)]
            continue
        is_gamma = key.rpartition(".")[2] == "gamma"
        factor = chance.uniform(*(FACTOR_OF_GAMMA if is_gamma else FACTOR)) ** (1 if up else -1)
        value = 1.0 - (1.0 - result[key]) * factor if is_gamma else result[key] * factor
        result[key] = min(max(value, float(what["low"])), float(what["high"]))
    return result


def drawn(space: Mapping[str, Any], chance: random.Random) -> dict[str, Any]:
    """Settings that a member begins with."""
    result = {}
    for key, what in space.items():
        if "choices" in what:
            result[key] = chance.choice(what["choices"])
        elif what.get("log"):
            result[key] = math.exp(chance.uniform(math.log(what["low"]), math.log(what["high"])))
        else:
            result[key] = chance.uniform(what["low"], what["high"])
    return result


# The folder


def records(folder: Path) -> list[Record]:
    """All records of a population by generation and member; one that is torn is left out, with a notice."""
    found = [record for file in folder.glob("m*-*.json") if (record := _read(file)) is not None]
    return sorted(found, key=lambda record: (record.generation, record.member))


def newest_records(folder: Path, generation: int) -> dict[int, Record]:
    """The newest record of each member that is whole, and not of a later generation."""
    found: dict[int, Record] = {}
    for file in sorted(folder.glob("m*-*.json"), key=lambda file: file.name, reverse=True):
        name = RECORD.fullmatch(file.name)
        if name and int(name[1]) not in found and int(name[2]) <= generation and (record := _read(file)) is not None:
            found[record.member] = record
    return found


def _read(file: Path) -> Record | None:
    """A record, which another process may have written; None where it is torn, with a notice."""
    try:
        values = load_json(file)
        record = Record(**{**values, "parent": tuple(values["parent"])})
        numbers = [record.iteration, record.env_steps, record.score, *record.parent]
        numbers += [value for value in record.settings.values() if not isinstance(value, str)]
        if record.name != file.name or not all(isinstance(number, int | float) for number in numbers):
            raise ValueError("it is no record of this member")
        if record.checkpoint != file.with_suffix(".pt").name:
            raise ValueError("its checkpoint is another file")
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        warn(f"{file} is left out: {str(error).partition(chr(10))[0]}")
        return None
    return record


class Member:
    """Makes a training one of a population.

    Args:
        folder: Of the population.
        number: Of the member, from 0.
        rules: Of the population.

    Attributes:
        settings: Those of the space, as they are now, by key.
    """

    def __init__(self, folder: Path, number: int, rules: Rules) -> None:
        self.folder, self.number, self.rules = folder, number, rules
        self.settings: dict[str, Any] = {}
        self._generation, self._changed_at = 0, 0  # generations that ended; control steps at the last change
        self._parent = (number, 0)
        self._best: float | None = None

    def begin(self, trainer: Trainer, state: Mapping[str, Any] | None) -> None:
        """Joins a training, before the algorithm is restored.

        Args:
            trainer: The training.
            state: `state_dict` of an earlier start.
        """
        if state is None:
            cfg = trainer.algorithm.cfg
            self.settings = {key: getattr(cfg, _name(key)) for key in self.rules.space}
            return
        self.settings = dict(state["settings"])
        self._generation, self._changed_at = int(state["generation"]), int(state["changed_at"])
        self._parent, self._best = (state["parent"][0], state["parent"][1]), state["best"]
        trainer.algorithm.change(_by_name(self.settings))

    def state_dict(self) -> dict[str, Any]:
        """What the member is, for checkpoints: a restart forgets nothing."""
        return {
            "settings": dict(self.settings),
            "generation": self._generation,
            "changed_at": self._changed_at,
            "parent": list(self._parent),
            "best": self._best,
        }

    def after_iteration(self, trainer: Trainer, rows: Sequence[LogRow], log: Logger) -> None:
        """Ends a generation where one is over: writes the record, and copies or mutates.

        Args:
            trainer: The training.
            rows: Of metrics that have arrived.
            log: Where it is told.
        """
        rules, steps = self.rules, trainer.env_steps
        for row in rows:
            if rules.objective not in row.numbers:
                known = ", ".join(row.numbers)
                raise ConfigError(f"objective={rules.objective}: metrics.csv has no such column. It has {known}")
            now = row.numbers[rules.objective]
            if now is not None and math.isfinite(now) and (self._best is None or now > self._best):
                self._best = now
        over = steps >= (self._generation + 1) * rules.interval
        if not (over or trainer.complete):
            return
        own = self._write(trainer, log)
        if not over:
            return
        self._generation, self._best, self._parent = steps // rules.interval, None, (self.number, self._generation + 1)
        if own is None or trainer.complete or steps < max(rules.initial_delay, self._changed_at + rules.start_after):
            return
        self._parent = (own.member, own.generation)
        self._go_on_from(own, trainer, log)

    def _write(self, trainer: Trainer, log: Logger) -> Record | None:
        """The checkpoint, then the record that names it; None where the disk is full."""
        from gpusim_rl.files.checkpoint_file import digest_of, save

        generation = max(self._generation + 1, trainer.env_steps // self.rules.interval)
        file = self.folder / f"m{self.number:02d}-{generation:06d}.pt"
        state = trainer.state_dict()
        try:
            save(file, {**state, "algorithm": _learner(state["algorithm"])})
            record = Record(
                self.number,
                generation,
                trainer.iteration,
                trainer.env_steps,
                self._best,
                dict(self.settings),
                self._parent,
                trainer.seed,
                file.name,
                digest_of(file) or "",
            )
            with replacing(self.folder / record.name) as target:
                target.write((json.dumps(dataclasses.asdict(record)) + "\n").encode())
        except OSError as error:
            log.console.warn(f"generation {generation} is NOT told to the population ({error}); training continues")
            return None
        for old in self.folder.glob(f"m{self.number:02d}-*.pt"):
            if old.stem[-6:].isdigit() and int(old.stem[-6:]) <= generation - self.rules.keep:
                old.unlink(missing_ok=True)
        return record

    def _go_on_from(self, own: Record, trainer: Trainer, log: Logger) -> None:
        from gpusim_rl.files.checkpoint_file import digest_of, load

        newest = newest_records(self.folder, own.generation)
        newest.pop(self.number, None)
        while True:
            # The same draws after a restart: a member that is set back decides as before.
            chance = random.Random(f"{own.seed}/{self.number}/{own.generation}")
            donor, settings = decide(own, list(newest.values()), self.rules, chance)
            if donor is own:
                break
            file = self.folder / donor.checkpoint
            try:
                state = load(file)
                if digest_of(file) != donor.digest:
                    raise ConfigError(f"{file} is not the checkpoint of {donor.name}")
            except ConfigError as error:
                log.console.warn(f"member {donor.member} is left out: {error}")
                del newest[donor.member]
                continue
            self._copy(trainer, state, donor)
            break
        if donor is own and settings == own.settings:
            return
        trainer.algorithm.change(_by_name(settings))
        self._changed_at, self._parent = trainer.env_steps, (donor.member, donor.generation)
        what = "mutated" if donor is own else f"copied member {donor.member} ({donor.score:.5g} > {own.score:.5g})"
        told = ", ".join(f"{key}={value:.4g}" for key, value in settings.items() if value != self.settings[key])
        log.console.info(f"population: generation {own.generation}: {what}{told and ': '}{told}")
        self.settings = settings

    def _copy(self, trainer: Trainer, state: Mapping[str, Any], donor: Record) -> None:
        """Weights, normalisers and optimiser of another member, in place; its noise and its memory stay there."""
        algorithm = trainer.algorithm
        noise = [generator.get_state() for generator in algorithm.generators]
        algorithm.change(_by_name(donor.settings))  # so that the rate of its schedule is taken over as it is
        algorithm.policy.load_state_dict(state["policy"])
        algorithm.load_state_dict(state["algorithm"])
        algorithm.begin_episodes()
        for generator, kept in zip(algorithm.generators, noise, strict=True):
            generator.set_state(kept)


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _by_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {_name(key): value for key, value in settings.items()}


def _learner(state: Mapping[str, Any]) -> dict[str, Any]:
    """State of an algorithm without its replay memory: each member learns from its own."""
    return {name: value for name, value in state.items() if name not in ("replay", "priorities")}


def member_of(spec: RunSpec) -> Member | None:
    """The member that a run is (`pbt.folder`, `pbt.member`); None where it is of no population.

    Raises:
        ConfigError: The folder is not that of a population.
    """
    cfg = spec.cfg.pbt
    if cfg.folder is None or spec.cfg.test:
        return None
    folder = Path(cfg.folder)
    return Member(folder, cfg.member, build(Rules, load_yaml(folder / "population.yaml"), "population"))


# The command


@dataclass(frozen=True)
class Population:
    """What `tools/tune.py method=pbt` starts.

    Attributes:
        study: Name of the population.
        rules: Of all members.
        overrides: What all members share, as typed behind `train.py`.
        config_dir: The user's folder (`-cd`).
        members: Numbers of those that this command starts.
        restarts: Times that a member is started again without a generation in between.
        stall_s: A member without a new row of metrics for so long is started again [s].
        folder: Of records, checkpoints, the table and the picture; run folders are beside it.
        seed: Of the first member.
        gpus: Of this machine.
    """

    study: str
    rules: Rules
    overrides: Sequence[str]
    config_dir: Path | None
    members: Sequence[int]
    restarts: int
    stall_s: int
    folder: Path
    seed: int
    gpus: int = 0

    def words(self, member: int, checkpoint: Path | None) -> list[str]:
        """The command line of a member, behind `train.py`."""
        given = {key_of(word) for word in self.overrides}
        begin = drawn(self.rules.space, random.Random(f"{self.seed}/{member}"))
        settings = [f"{key}={value}" for key, value in begin.items()] if member else []  # the first: as configured
        group = [] if "wandb_group" in given else [f"wandb_group={self.study}"]
        device = [f"device=cuda:{member % self.gpus}"] if self.gpus > 1 and "device" not in given else []
        return [
            *(["-cd", str(self.config_dir)] if self.config_dir is not None else []),
            *self.overrides,
            *settings,
            *group,
            *device,
            f"seed={self.seed + member}",
            f"experiment={self.study}.{member:02d}",
            "log.console=quiet",
            f"pbt.folder={quote(str(self.folder.absolute()))}",
            f"pbt.member={member}",
            *([f"checkpoint={quote(str(checkpoint))}"] if checkpoint is not None else []),
        ]


def read_population(words: Sequence[str], config_dir: Path | None = None) -> Population:
    """Read and check a command line of `tools/tune.py method=pbt`.

    Args:
        words: `key=value`, of the population and of the training.
        config_dir: The user's folder (`-cd`).

    Raises:
        ConfigError: A setting is unknown, or the space has one that cannot change during a training.
    """
    chosen, overrides = split_words(words, OWN)
    number = {key: _number(key, chosen[key]) for key in OWN if OWN[key][:1].isdigit()}
    if number["population"] < 2:
        raise ConfigError(f"population must be at least 2, got {number['population']}")
    study, space, config = find_space(chosen, overrides, config_dir, OWN)
    space = _tunable(config, space, given=bool(chosen["space"]))
    rules = build(
        Rules,
        {
            **{key: value for key, value in number.items() if key not in ("restarts", "stall_s")},
            "objective": chosen["objective"],
            "space": space,
        },
        "population",
    )
    import torch

    seed = random.SystemRandom().randrange(2**30) if config["seed"] == -1 else config["seed"]
    members = _members(chosen["members"], rules.population)
    folder = Path(config["log"]["dir"]) / study
    return Population(
        study=study,
        rules=rules,
        overrides=overrides,
        config_dir=config_dir,
        members=members,
        restarts=number["restarts"],
        stall_s=number["stall_s"],
        folder=folder,
        seed=seed,
        gpus=torch.cuda.device_count(),
    )


def _number(key: str, text: str) -> Any:
    is_share = "." in OWN[key]
    with suppress(ValueError):
        number = float(text)
        if is_share and 0.0 <= number < math.inf and (key.startswith("better") or number <= 1.0):
            return number
        if (
            not is_share
            and 0.0 <= number < 2**62
            and number == int(number)
            and (number or key not in ("interval", "keep", "stall_s"))
        ):
            return int(number)
    raise ConfigError(f"{key} must be {'a number in [0, 1]' if is_share else 'a positive int'}, got {text!r}")


def _members(text: str, population: int) -> list[int]:
    if not text:
        return list(range(population))
    found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not first <= last < population:
        raise ConfigError(f"members must be such as 0-3, of the numbers 0 to {population - 1}, got {text!r}")
    return list(range(first, last + 1))


def _tunable(config: Mapping[str, Any], space: Mapping[str, Any], *, given: bool) -> dict[str, Any]:
    """Of a space what can change during a training; of a space of the user's everything must."""
    from gpusim_rl.learn.algorithm import load_algorithm_class

    algo = config["algo"]["name"]
    can = [f"{algo}.{name}" for name in load_algorithm_class(config["algo"]["_target_"]).tunable]
    cannot = [key for key in space if key not in can]
    if not can or (given and cannot) or len(cannot) == len(space):
        what = f"{cannot[0]} cannot change" if cannot else "nothing can change"
        raise ConfigError(
            f"{what} during a training of algo={algo}. What can: {', '.join(can) or 'nothing'}. Try"
            " method=optuna for the rest"
        )
    if cannot:
        warn(f"method=pbt does not change {', '.join(cannot)}: that is fixed during a training")
    if unset := [key for key in space if key in can and config[algo][_name(key)] is None]:
        raise ConfigError(f"{unset[0]} is null: the first member begins with it. Try {unset[0]}=<number>")
    return {key: dict(what) for key, what in space.items() if key in can}


def breed(population: Population) -> list[str]:
    """Start the members, start them again where they die, and wait for their end; writes the table and the picture.

    Returns:
        Lines for the user: the members by their score, and where the best one is.

    Raises:
        ConfigError: The folder is of a population with other rules, or cannot be written; or another command trains a
            member; or a member was given up.
    """
    folder = population.folder
    with ExitStack() as logs:
        with _one_line_if_unwritable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _share_rules(folder / "population.yaml", population.rules)
            log_of = {member: logs.enter_context(_log(population, member)) for member in population.members}
        lost = _watch(population, log_of)
    with _one_line_if_unwritable(folder):
        told = _report(population)
    if lost:
        raise ConfigError(f"{'; '.join(lost)}. All others are done: the same command tries again")
    return told


@contextmanager
def _one_line_if_unwritable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error.strerror}. What is there stays: the same command goes on"
        ) from None


def _log(population: Population, member: int) -> IO[bytes]:
    """The file that a member prints to. It is locked as long as this command or the member has it open.

    Raises:
        ConfigError: Another command has started the member.
    """
    file = (population.folder / f"{member:02d}.log").open("ab")
    with suppress(OSError):  # a file system without locks
        if not lock(file):
            file.close()
            raise ConfigError(
                f"{population.folder}: another command trains member {member}. Try members=<others>, of 0 to"
                f" {population.rules.population - 1}, or wait for its end"
            )
    return file


def _share_rules(file: Path, rules: Rules) -> None:
    values = dataclasses.asdict(rules)
    if not file.exists():
        with replacing(file) as target:
            target.write(dump_yaml(values))
    before = load_yaml(file)
    different = [key for key in values if not isinstance(before, dict) or before.get(key) != values[key]]
    if different:
        key = different[0]
        was = before.get(key) if isinstance(before, dict) else before
        raise ConfigError(f"{file}: the population has {key}={was}, got {values[key]}. Try another study=<name>")


@dataclass(slots=True)
class _Started:
    """A member that this command has started."""

    process: subprocess.Popen[bytes]
    restarts: int = 0
    """Times that it was started again without a record in between."""
    newest: Path | None = None
    """Its newest record when it was started again."""
    row_ns: int = 0
    """When its newest row of metrics was written [ns]."""
    heard_s: float = 0.0
    """When that was seen [s]."""
    stalled: bool = False


def _watch(population: Population, logs: Mapping[int, IO[bytes]]) -> list[str]:
    """Runs the members to their ends; returns a reason for each that was given up."""
    members: dict[int, _Started] = {}
    lost, told = [], set(population.folder.glob("m*-*.json"))
    try:
        for member in population.members:
            members[member] = _Started(_start(population, member, logs[member]), heard_s=time.monotonic())
        while members:
            time.sleep(POLL_S)
            told |= _tell(population.folder, told)
            for member, it in list(members.items()):
                if it.process.poll() is None:
                    _end_if_stalled(population, member, it)
                    continue
                del members[member]
                if it.process.returncode == 0:
                    continue
                newest = max(population.folder.glob(f"m{member:02d}-*.json"), default=None)
                restarts = 1 if newest != it.newest else it.restarts + 1
                why = _why(population, member, it)
                if restarts > population.restarts:
                    lost.append(f"member {member} is given up: {why}")
                    continue
                warn(f"member {member} ended ({why}): it is started again")
                process = _start(population, member, logs[member])
                members[member] = _Started(process, restarts, newest, heard_s=time.monotonic())
    finally:
        end(*(it.process for it in members.values()))
    return lost


def _end_if_stalled(population: Population, member: int, it: _Started) -> None:
    run = population.folder.parent / f"{population.study}.{member:02d}" / "latest"
    with suppress(OSError):
        row_ns = (run / "metrics.csv").stat().st_mtime_ns
        if row_ns != it.row_ns:
            it.row_ns, it.heard_s = row_ns, time.monotonic()
    if time.monotonic() - it.heard_s > population.stall_s:
        it.stalled = True
        it.process.kill()  # it may not be able to end by itself


def _why(population: Population, member: int, it: _Started) -> str:
    """Why a member has ended, in words."""
    status = it.process.returncode
    if it.stalled:
        return f"no row of metrics for {population.stall_s} s"
    if status < 0:
        return signal.Signals(-status).name
    said = (population.folder / f"{member:02d}.log").read_text(errors="replace").strip().splitlines()
    return said[-1].removeprefix("error: ") if said else f"exit status {status}"


def _tell(folder: Path, told: set[Path]) -> set[Path]:
    """Prints a line for each record that is new, and returns these."""
    new = set(folder.glob("m*-*.json")) - told
    for record in sorted(filter(None, map(_read, new)), key=lambda record: (record.generation, record.member)):
        parent = "" if record.parent[0] == record.member else f", after a copy of member {record.parent[0]}"
        score = "no score" if record.objective is None else f"{record.objective:.5g}"
        sys.stderr.write(f"generation {record.generation}  member {record.member}  {score}{parent}\n")
    sys.stderr.flush()
    return new


def _start(population: Population, member: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    words = population.words(member, _newest_checkpoint(population, member))
    # The members share the CPUs as processes of torchrun do.
    env = {**os.environ, "LOCAL_WORLD_SIZE": str(len(population.members))}
    command = [sys.executable, str(paths.train_file()), *words]
    # A session of its own: Ctrl-C reaches it once, from here, and it ends with a checkpoint.
    return subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)


def _newest_checkpoint(population: Population, member: int) -> Path | None:
    """What a member continues from: its run, else its newest checkpoint in the population; None begins a run."""
    from gpusim_rl.files.checkpoint_file import load

    group = population.folder.parent / f"{population.study}.{member:02d}"
    runs = [file for file in group.glob("*/checkpoints/last.pt") if not file.parents[1].is_symlink()]
    runs.sort(key=lambda file: file.stat().st_mtime_ns, reverse=True)
    told = sorted(population.folder.glob(f"m{member:02d}-*.pt"), reverse=True)
    for file in [*runs[:1], *told]:
        try:
            load(file)
        except ConfigError as error:
            warn(f"member {member}: {error}")
            continue
        return file.parents[1].absolute() if file.name == "last.pt" else file.absolute()
    return None


# What came of it


def _report(population: Population) -> list[str]:
    found = records(population.folder)
    keys = list(population.rules.space)
    header = ["member", "generation", "env_steps", "objective", *keys, "parent_member", "parent_generation", "seed"]
    lines = [",".join(header)]
    for r in found:
        row = [r.member, r.generation, r.env_steps, r.objective, *(r.settings[key] for key in keys), *r.parent, r.seed]
        lines.append(",".join("" if cell is None else str(cell) for cell in row))
    with replacing(population.folder / "population.csv") as file:
        file.write(("\n".join(lines) + "\n").encode())
    newest = sorted({r.member: r for r in found}.values(), key=lambda record: -record.score)
    copies = sum(r.parent[0] != r.member for r in found)
    told = [f"{population.study}: {len(newest)} members, {len(found)} records, {copies} copies"]
    if not newest:
        told.append(f"no member wrote a record: was max_iterations reached before? {population.folder} has their logs")
    for r in newest[:5]:
        settings = "  ".join(f"{key}={value:.4g}" for key, value in r.settings.items())
        told.append(f"  {r.score:10.5g}  member {r.member}  {settings}")
    if newest:
        run = population.folder.parent / f"{population.study}.{newest[0].member:02d}"
        told += ["best:", f"  python tools/play.py {run}"]
    told.append(f"table: {population.folder / 'population.csv'}")
    if len(found) > 1 and (picture := _draw(population, found)) is not None:
        told.append(f"picture: {picture}")
    return told


def _draw(population: Population, found: Sequence[Record]) -> Path | None:
    """Who copied whom, and the paths of the settings, where matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    space, by_name = population.rules.space, {(r.member, r.generation): r for r in found}
    figure, axes = pyplot.subplots(len(space) + 2, 1, figsize=(9, 2.2 * (len(space) + 2)), sharex=True, squeeze=False)
    tree, score, *paths_of_settings = axes[:, 0]
    colours = {member: f"C{member % 10}" for member in sorted({r.member for r in found})}
    for record in found:
        parent = by_name.get(record.parent)
        start = (parent.env_steps, parent.member) if parent else (0, record.member)
        copied = start[1] != record.member
        style = {"color": colours[start[1]], "linewidth": 2.0 if copied else 1.2}
        tree.plot([start[0], record.env_steps], [start[1], record.member], marker="o", markersize=3, **style)
    for member, colour in colours.items():
        path = [r for r in found if r.member == member]
        steps = [r.env_steps for r in path]
        score.plot(steps, [math.nan if r.objective is None else r.objective for r in path], color=colour)
        for axis, key in zip(paths_of_settings, space, strict=True):
            axis.plot(steps, [r.settings[key] for r in path], color=colour, drawstyle="steps-pre")
    tree.set_ylabel("member")
    tree.set_yticks(list(colours))
    tree.set_title(f"{population.study}: a line that changes its row is a copy")
    score.set_ylabel(population.rules.objective)
    for axis, (key, what) in zip(paths_of_settings, space.items(), strict=True):
        axis.set_ylabel(key)
        if what.get("log"):
            axis.set_yscale("log")
    axes[-1, 0].set_xlabel("control steps of a member")
    file = population.folder / "lineage.png"
    with replacing(file) as target:
        figure.savefig(target, format="png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return file
