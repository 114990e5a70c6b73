"""Smallest disturbances that make an exported policy fall, and its fall rates at fixed disturbances."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gpusim_rl.deployed.gate import PUSHES
from gpusim_rl.deployed.variants import VARIANTS, scale_effort, scale_friction, scale_gains, variant_name, vary
from gpusim_rl.deployed.walkers import MAX_DELAY, Walkers
from gpusim_rl.errors import ConfigError

SPEED = 0.5  # forward command [m/s], or the nearest in the trained range
WALK_S, AFTER_S = 4.0, 3.0  # time before a disturbance; time after it in which a fall counts
WALKING = 2  # robots that walk up to the disturbances
PHASES, SEARCHED = 12, 3  # starts of each robot per gait cycle: for fall rates, and for searches
ROBOTS = 256  # simulated at once
HALVINGS = {"push": 6}  # of the range of sizes
FEWER_HALVINGS = 5  # of other kinds
CONFIRMED = 2  # weakest directions that are tried from all starts
START_NOISE = 0.05  # of joint positions at the start of an episode [rad]
LARGEST_PUSH = 3.0  # [m/s]
FORCES_S = (0.08, 0.2)  # duration of forces, whose largest impulse is that of the largest push
EPISODES = 64  # per fall rate
EPISODE_S = 5.0  # length of an episode in changed physics
PERIOD_S = (0.24, 1.6)  # plausible gait periods
Z = 1.96  # of a 95 % interval
REPLAY_HZ = 25.0
SIDES = ("behind", "behind right", "right", "front right", "front", "front left", "left", "behind left")
SLOPES = ("downhill", "rising to the right", "uphill", "rising to the left")
Apply = Callable[[Walkers, np.ndarray, np.ndarray], None]
"""Disturbance of the robots with the given indices, with a size for each."""


@dataclass
class SizeSearch:
    """Search for the smallest size of a disturbance that makes the robot fall, in the worst of several ways."""

    kind: str
    label: str
    unit: str
    largest: float
    ways: Mapping[str, Apply]  # such as directions, by name
    step: float = 0.0  # sizes are multiples of this
    phases: int = SEARCHED  # starts of each robot; 1: one start of one robot
    smallest: float | None = None  # size that made the robot fall; None: not even `largest` did
    held: float = 0.0  # largest size without a fall
    worst: tuple[str, int] = ("", 0)  # way and start of the fall at `smallest`
    candidates: list[tuple[str, int]] = field(default_factory=list)

    def next_size(self, halving: int) -> float | None:
        """Return the size to try, or None if the search has ended."""
        if halving == 0:
            return self.largest
        if self.smallest is None or halving > HALVINGS.get(self.kind, FEWER_HALVINGS):
            return None
        size = (self.held + self.smallest) / 2.0
        size = math.floor(size / self.step + 1e-6) * self.step if self.step else size
        return size if size > self.held + 1e-9 else None

    def trial(self, way: str, start: int, size: float) -> Trial:
        """Return a trial of a size."""
        return Trial(self.ways[way], start, size)

    def row(self) -> dict[str, Any]:
        """Return the result for stress.json; without a fall, `smallest` is None."""
        names = ("kind", "label", "unit", "smallest", "held", "largest")
        way, start = self.worst
        return {**{name: getattr(self, name) for name in names}, "way": way, "phase": start % PHASES / PHASES}

    def update(self, size: float, fell: np.ndarray) -> None:
        """Narrow the search after trials of all candidates; those that fell stay candidates."""
        if not fell.any():
            self.held = size
            return
        if size < self.largest:  # a later disturbance may fell those that the largest does not
            self.candidates = [it for it, yes in zip(self.candidates, fell, strict=True) if yes]
        self.smallest, self.worst = size, self.candidates[int(fell.argmax()) if size == self.largest else 0]


@dataclass(frozen=True)
class Trial:
    """Disturbance of a robot that walks: size, and index of its start."""

    apply: Apply
    start: int
    size: float


def rate(name: str, falls: int, episodes: int) -> dict[str, Any]:
    """Return a row for stress.json: falls in independent episodes, and the 95 % Wilson interval of their rate."""
    share, spread = falls / episodes, Z * Z / episodes
    middle = (share + spread / 2.0) / (1.0 + spread)
    half = math.sqrt(spread * (share * (1.0 - share) + spread / 4.0)) / (1.0 + spread)
    interval = [max(0.0, middle - half), min(1.0, middle + half)]
    return {"name": name, "falls": falls, "episodes": episodes, "interval": interval}


class StressTest:
    """Experiments with one policy (or a baseline), whose robots first walk undisturbed.

    Args:
        walkers: Robots, at least twice as many as `WALKING * PHASES`.
        seed: Seed of initial states, commands and random pushes; equal seeds give equal experiments for all policies.
    """

    def __init__(self, walkers: Walkers, seed: int = 0) -> None:
        self.walkers, self.seed = walkers, seed
        self.limits = ranges(walkers)
        self.command = np.array(
            [min(max(SPEED * (name == "x"), low), high) for name, (low, high) in self.limits.items()]
        )
        self.first = WALKING * PHASES  # robots below this index keep the starts of trials
        self.standing = float(walkers.card["start"]["qpos"][walkers.root + 2])
        self.period_s, self.fell_s = 0.0, 0.0  # gait period; time of a fall without a disturbance, or 0
        self._walk()
        if self.fell_s and walkers.policy == "file":
            hint = "Try gpusim-rl play, or another checkpoint"
            raise ConfigError(
                f"the policy falls undisturbed, after {self.fell_s:.1f} s", key=str(walkers.folder), hint=hint
            )

    def _walk(self) -> None:
        """Walk until the gait is regular, then keep the state at each phase of the gait."""
        walkers, rows = self.walkers, self.first + np.arange(WALKING)
        active, trace = np.isin(np.arange(walkers.num), rows), list[np.ndarray]()
        walkers.restore()
        self._begin(rows, np.random.default_rng(self.seed), np.tile(self.command, (WALKING, 1)))
        for step in range(round(WALK_S * walkers.control_hz)):
            walkers.step(active)
            trace.append(walkers.qpos[rows])
            if walkers.fallen(self.standing)[rows].any():
                self.fell_s = (step + 1) * walkers.dt
                return
        regular = np.array(trace)[len(trace) // 3 :]
        self.standing = float(np.median(regular[..., walkers.root + 2]))
        period, phase = gait(np.diff(regular[..., walkers.qpos_of], axis=0), walkers.control_hz)
        self.period_s = period * walkers.dt
        wait = np.rint(np.mod(np.arange(PHASES) / PHASES - phase[:, None], 1.0) * period)  # [robots, phases], in steps
        for step in range(int(wait.max()) + 1):
            robots, phases = np.nonzero(wait == step)
            walkers.copy(rows[robots], robots * PHASES + phases)
            trace.append(walkers.qpos[rows])
            walkers.step(active)
        self._trace, self._starts_at = np.array(trace), (len(trace) - 1 - wait.max() + wait).astype(int)

    def _begin(self, rows: np.ndarray, rng: np.random.Generator, commands: np.ndarray, copies: int = 1) -> None:
        """Start episodes: the card's start with random joint positions, which every group of `copies` shares."""
        walkers = self.walkers
        walkers.reset(rows)
        noise = rng.uniform(-START_NOISE, START_NOISE, (len(rows) // copies, len(walkers.qpos_of)))
        walkers.qpos[rows[:, None], walkers.qpos_of] += np.repeat(noise, copies, axis=0)
        walkers.command[rows] = np.repeat(commands, copies, axis=0)
        walkers.refresh(rows)

    def _run(self, rows: np.ndarray, seconds: float) -> tuple[np.ndarray, np.ndarray]:
        """Step robots until they fall; return which fell, and mean errors of the horizontal velocity [m/s]."""
        walkers, active = self.walkers, np.zeros(self.walkers.num, bool)
        error, steps = np.zeros(walkers.num), np.zeros(walkers.num)
        active[rows] = True
        columns = [walkers.commands.index(name) for name in "xy" if name in walkers.commands]
        for _ in range(round(seconds * walkers.control_hz)):
            walkers.step(active)
            active &= ~walkers.fallen(self.standing)
            if not active.any():
                break
            wrong = walkers.velocity[:, : len(columns)] - walkers.command[:, columns]
            error[active] += np.linalg.norm(wrong, axis=1)[active]
            steps += active
        return ~active[rows], (error / np.maximum(steps, 1.0))[rows]

    def trials(self, trials: Sequence[Trial]) -> np.ndarray:
        """Disturb walking robots, all at once; return whether each fell within AFTER_S."""
        at_once = self.walkers.num - self.first
        parts = [trials[first : first + at_once] for first in range(0, len(trials), at_once)]
        return np.concatenate([np.zeros(0, bool), *(self._run(self._disturb(part), AFTER_S)[0] for part in parts)])

    def _disturb(self, trials: Sequence[Trial]) -> np.ndarray:
        rows = self.first + np.arange(len(trials))
        self.walkers.restore()
        self.walkers.copy(np.array([trial.start for trial in trials]), rows)
        sizes = np.array([trial.size for trial in trials])
        for apply in dict.fromkeys(trial.apply for trial in trials):
            same = np.array([trial.apply is apply for trial in trials])
            apply(self.walkers, rows[same], sizes[same])
        return rows

    def search(self, searches: Sequence[SizeSearch]) -> None:
        """Bisect all searches in parallel."""
        for search in searches:
            step, robots = PHASES // search.phases, range(WALKING if search.phases > 1 else 1)
            shifts = [robot * PHASES + robot * step // WALKING for robot in robots]  # robots differ in phase
            starts = [shift + phase for shift in shifts for phase in range(0, PHASES, step)]
            search.candidates = [(way, start) for way in search.ways for start in starts]
        for halving in range(1 + max(HALVINGS.values())):
            sizes = [search.next_size(halving) for search in searches]
            left = [(search, size) for search, size in zip(searches, sizes, strict=True) if size is not None]
            trials = [search.trial(way, start, size) for search, size in left for way, start in search.candidates]
            fell = self.trials(trials)
            for search, size in left:
                yes, fell = np.split(fell, [len(search.candidates)])
                search.update(size, yes)
        self._confirm([search for search in searches if search.kind == "push" and search.smallest is not None])

    def _confirm(self, searches: Sequence[SizeSearch]) -> None:
        """Try smaller pushes from all starts in the weakest directions, as falls are not monotonic in size."""
        weakest = sorted(searches, key=lambda search: search.smallest or math.inf)[:CONFIRMED]
        while weakest := [search for search in weakest if search.held > 0.0]:
            every = [[(way, start) for way in search.ways for start in range(self.first)] for search in weakest]
            pairs = zip(weakest, every, strict=True)
            fell = self.trials([search.trial(*it, search.held) for search, tried in pairs for it in tried])
            felled = list[SizeSearch]()
            for search, tried, yes in zip(weakest, every, np.split(fell, len(weakest)), strict=True):
                if yes.any():
                    search.smallest, search.worst = search.held, tried[int(yes.argmax())]
                    search.held = max(0.0, search.held - search.largest / 2 ** HALVINGS["push"])
                    felled.append(search)
            weakest = felled

    def push_rate(self, size: float, episodes: int) -> dict[str, Any]:
        """Return the row of falls after pushes of one size, in random directions and phases."""
        rng = np.random.default_rng(self.seed)
        angles, starts = rng.uniform(0.0, math.tau, episodes), rng.integers(self.first, size=episodes)
        trials = [Trial(partial(push, angle), int(start), size) for angle, start in zip(angles, starts, strict=True)]
        return rate(f"falls_push_{size:g}", int(self.trials(trials).sum()), episodes)

    def variants(
        self, each: int, seconds: float = EPISODE_S, groups: Iterable[str] = VARIANTS
    ) -> list[tuple[dict[str, Any], float]]:
        """Return falls, and the mean velocity error [m/s], in unchanged and in changed physics, see `VARIANTS`.

        Episodes start on the spot; all variants have the same initial states and random commands.
        """
        walkers, rng, results = self.walkers, np.random.default_rng(self.seed), list[np.ndarray]()
        cases = [("plain", 1.0), *((group, value) for group in groups for value in VARIANTS[group])]
        at_once = (walkers.num - self.first) // len(cases)
        low, high = np.array([*self.limits.values()]).T
        for number in [at_once] * (each // at_once) + [each % at_once] * bool(each % at_once):
            rows = self.first + np.arange(number * len(cases))
            walkers.restore()
            self._begin(rows, rng, rng.uniform(low, high, (number, len(low))), copies=len(cases))
            for case, (group, value) in enumerate(cases[1:], start=1):
                vary(group, walkers, rows[case :: len(cases)], np.full(number, value))
            results.append(np.reshape(self._run(rows, seconds), (2, number, len(cases))))
        fell, errors = np.concatenate(results, axis=1)
        names = ["plain", *(variant_name(group, value, walkers.control_hz) for group, value in cases[1:])]
        rates = [rate(name, int(count), each) for name, count in zip(names, fell.sum(axis=0), strict=True)]
        return [*zip(rates, errors.mean(axis=0).tolist(), strict=True)]

    def replay(self, search: SizeSearch) -> dict[str, Any]:
        """Return rate and positions of the fall that a search found, from a second before the disturbance."""
        walkers, (way, start) = self.walkers, search.worst
        assert search.smallest is not None
        rows, robot = self._disturb([search.trial(way, start, search.smallest)]), start // PHASES
        before = self._starts_at.flat[start]
        frames = [*self._trace[before - round(walkers.control_hz) : before, robot]]
        for _ in range(round(AFTER_S * walkers.control_hz)):
            frames.append(walkers.qpos[rows[0]].copy())
            walkers.step(np.arange(walkers.num) == rows[0])
        every = max(1, round(walkers.control_hz / REPLAY_HZ))
        return {"hz": walkers.control_hz / every, "qpos": np.round(frames[::every], 4).tolist()}


def gait(speeds: np.ndarray, hz: float) -> tuple[float, np.ndarray]:
    """Return the period of a gait [steps], and each robot's phase after the last step, 0 to 1, [robots].

    Args:
        speeds: Joint velocities, [steps, robots, joints].
        hz: Steps per second.
    """
    x = speeds - speeds.mean(axis=0)
    first, last = (round(seconds * hz) for seconds in PERIOD_S)
    lags = range(max(2, first), min(last, len(x) // 2))
    norms = [math.sqrt((x[:-lag] ** 2).sum() * (x[lag:] ** 2).sum()) + 1e-9 for lag in lags]
    alike = np.array([(x[:-lag] * x[lag:]).sum() / norm for lag, norm in zip(lags, norms, strict=True)])
    inner = np.arange(1, len(lags) - 1)
    peaks = inner[(alike[1:-1] >= alike[:-2]) & (alike[1:-1] >= alike[2:]) & (alike[1:-1] > 0.9 * alike.max())]
    period = float(lags[int(peaks[0])] if len(peaks) else lags[int(alike.argmax())])
    steps = np.arange(-round(2 * period), 0)
    waves = np.einsum("t,trj->rj", np.exp(-2j * np.pi * steps / period), x[steps])
    joint = int(np.abs(waves).mean(axis=0).argmax())
    return period, np.mod(np.angle(waves[:, joint]) / math.tau, 1.0)


def ranges(walkers: Walkers) -> dict[str, tuple[float, float]]:
    """Return the trained range of each command; (0, 0) if unknown, and for x the speed of the disturbances."""
    given: dict[str, tuple[float, float]] = {}
    for name, limits in walkers.card["commands"].items():
        try:
            low, high = map(float, limits or [SPEED * (name == "x")] * 2)
        except (TypeError, ValueError):
            low, high = math.nan, math.nan
        if not -math.inf < low <= high < math.inf:
            raise ConfigError("damaged card", key=f"{walkers.folder}: commands.{name}", expected="a range", got=limits)
        given[name] = low, high
    if "x" not in given:
        raise ConfigError("the policy takes no command x", key=str(walkers.folder), got=", ".join(given) or "none")
    return given


def push(angle: float, walkers: Walkers, rows: np.ndarray, size: np.ndarray) -> None:
    """Change the base's velocity [m/s] in a direction [rad], counter-clockwise from forward."""
    walkers.push(rows, np.outer(size, [math.cos(angle), math.sin(angle), 0.0]))


def force(angle: float, seconds: float, walkers: Walkers, rows: np.ndarray, size: np.ndarray) -> None:
    """Pull the torso [N] in a direction [rad] for some time [s]."""
    walkers.force[rows] = np.outer(size, [math.cos(angle), math.sin(angle), 0.0])
    walkers.force_until[rows] = walkers.steps[rows] + round(seconds * walkers.control_hz)


def slope(angle: float, walkers: Walkers, rows: np.ndarray, size: np.ndarray) -> None:
    """Tilt the ground [degrees], downhill in a direction [rad].

    Gravity tilts instead, which is the same seen from the ground: `gravity`, gyros and accelerometers measure the tilt,
    and falls are relative to the ground's normal. Only `frame...` sensors keep measuring from the ground.
    """
    walkers.slope(rows, np.radians(size), np.tile([math.cos(angle), math.sin(angle), 0.0], (len(rows), 1)))


def payload(walkers: Walkers, rows: np.ndarray, size: np.ndarray) -> None:
    """Add a mass [kg] in the torso's centre of mass."""
    walkers.vary("body_mass")[rows, walkers.torso] += size
    walkers.refresh(rows, constants=True)


def command_step(column: int, limit: float, walkers: Walkers, rows: np.ndarray, size: np.ndarray) -> None:
    """Change a command by a share [%] of the way to a limit of its trained range."""
    now = walkers.command[rows, column]
    walkers.command[rows, column] = now + size / 100.0 * (limit - now)


def slippery(walkers: Walkers, rows: np.ndarray, size: np.ndarray) -> None:
    """Reduce friction by a share [%]."""
    scale_friction(walkers, rows, 1.0 - size / 100.0)


def delayed(walkers: Walkers, rows: np.ndarray, size: np.ndarray) -> None:
    """Delay controls [ms]."""
    walkers.delay[rows] = np.rint(size / 1000.0 * walkers.control_hz)


def weak_motor(actuator: int, walkers: Walkers, rows: np.ndarray, size: np.ndarray) -> None:
    """Reduce gains and force limit of an actuator by a share [%]."""
    for scale in (scale_gains, scale_effort):
        scale(walkers, rows, 1.0 - size / 100.0, only=[actuator])


def all_searches(walkers: Walkers) -> list[SizeSearch]:
    """Return the searches of a study, eight of them pushes."""
    model, tick = walkers.model, 1000.0 / walkers.control_hz
    mass, quarters = float(model.body_subtreemass[walkers.base]), [math.tau / 4.0 * i for i in range(4)]
    angles = {f"from {side}": math.tau / 8.0 * i for i, side in enumerate(SIDES)}
    pushes = {side: {side: partial(push, angle)} for side, angle in angles.items()}
    forces = {s: {side: partial(force, angle, s) for side, angle in [*angles.items()][::2]} for s in FORCES_S}
    limits = [(i, name, end) for i, (name, both) in enumerate(ranges(walkers).items()) for end in both]
    commands = {f"{name} to {end:.3g}": partial(command_step, i, end) for i, name, end in limits}
    motors = {model.actuator(i).name: partial(weak_motor, i) for i in range(model.nactuator)}
    slopes = {name: partial(slope, angle) for name, angle in zip(SLOPES, quarters, strict=True)}
    return [
        *(SizeSearch("push", f"push {side}", "m/s", LARGEST_PUSH, way) for side, way in pushes.items()),
        *(SizeSearch("force", f"force for {s:g} s", "N", LARGEST_PUSH * mass / s, way) for s, way in forces.items()),
        SizeSearch("payload", "payload", "kg", mass, {"on the torso": payload}),
        SizeSearch("command", "command step", "% of range", 100.0, commands),
        SizeSearch("friction", "less friction", "%", 95.0, {"all contacts": slippery}),
        SizeSearch("delay", "delay", "ms", MAX_DELAY * tick, {"all controls": delayed}, step=tick),
        SizeSearch("motor", "weak motor", "%", 100.0, motors, phases=1),
        SizeSearch("slope", "slope", "degrees", 30.0, slopes),
    ]


def stress(folder: Path, seed: int = 0, episodes: int = EPISODES) -> dict[str, Any]:
    """Stress the policy of an export folder, and its baselines by pushes; return the content of stress.json."""
    walkers = Walkers(folder, ROBOTS, seed)
    study = StressTest(walkers, seed)
    study.search(searches := all_searches(walkers))
    changed = [row for row, _ in study.variants(math.ceil(episodes / 8))]
    total = rate("falls", *(sum(row[key] for row in changed) for key in ("falls", "episodes")))
    rates = [total, *(study.push_rate(size, episodes) for size in PUSHES), *changed]
    fell = [search for search in searches if search.smallest is not None]
    worst = min(fell, key=lambda it: (it.kind != "push", (it.smallest or 0.0) / it.largest), default=None)
    row = {**(worst.row() if worst else {}), **(study.replay(worst) if worst else {})}
    zero = baseline(walkers, "zero", seed, episodes)
    hold = zero if walkers.holds_at_zero else baseline(walkers, "hold", seed, episodes)
    return {
        "task": walkers.card.get("task"),
        "seed": seed,
        "command": dict(zip(walkers.commands, study.command.tolist(), strict=True)),
        "standing_height_m": study.standing,
        "gait_period_s": study.period_s,
        "searches": [search.row() for search in searches],
        "rates": rates,
        "worst": row or None,
        "baselines": {"zero": zero, "hold": hold},
    }


def baseline(walkers: Walkers, policy: Literal["zero", "hold"], seed: int, episodes: int) -> dict[str, Any]:
    """Return the pushes that a robot with constant targets withstands."""
    walkers.policy = policy
    study = StressTest(walkers, seed)
    searches = [] if study.fell_s else [search for search in all_searches(walkers) if search.kind == "push"]
    study.search(searches)
    rates = [study.push_rate(size, episodes) for size in (() if study.fell_s else PUSHES)]
    return {"fell_s": study.fell_s, "searches": [search.row() for search in searches], "rates": rates}
