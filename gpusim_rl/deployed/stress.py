"""Smallest disturbances that make an exported policy fall, and its fall rates at fixed disturbances."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gpusim_rl.deployed.variants import VARIANTS, change, factors, variant_name
from gpusim_rl.deployed.walkers import Walkers
from gpusim_rl.errors import ConfigError

SPEED = 0.5  # forward command [m/s], or the nearest in the trained range
WALK_S, AFTER_S = 4.0, 3.0  # time before a disturbance; time after it in which a fall counts
ROBOTS = 256  # simulated at once
WALKING, PHASES = 2, 12  # robots that walk up to the disturbances; starts of each robot per gait cycle
SEARCHED = (0, 4, 8, 14, 18, 22)  # starts of searches: three phases of each robot
HALVINGS, PUSH_HALVINGS = 5, 6  # of the range of sizes
CONFIRMED = 2  # weakest directions that are tried from all starts
START_NOISE = 0.05  # of joint positions at the start of an episode [rad]
LARGEST_PUSH, PUSHES = 3.0, (0.5, 1.0)  # of searches; of fall rates [m/s]
FORCES_S = (0.08, 0.2)  # duration of forces, whose largest impulse is that of the largest push
EPISODES, EPISODE_S = 64, 5.0  # per fall rate; length of an episode in changed physics
PERIOD_S = (0.24, 1.6)  # plausible gait periods
Z = 1.96  # of a 95 % interval
REPLAY_HZ = 25.0
SIDES = ("behind", "behind right", "right", "front right", "front", "front left", "left", "behind left")
SLOPES = ("downhill", "rising to the right", "uphill", "rising to the left")


Trial = tuple[int, str, float, Any]
"""Index of a start, and `kind`, `value` and `way` of `change`."""
Trials = Generator[Sequence[Trial], np.ndarray, None]
"""Experiment: yields trials, gets whether the robot fell in each, and ends with no trials."""


@dataclass
class SizeSearch:
    """Search for the smallest size of a disturbance that makes the robot fall, in the worst of several ways."""

    kind: str
    label: str
    unit: str
    largest: float
    ways: Mapping[str, Any]  # such as directions, by name
    value: Callable[[float], float] = float  # from a size to the value of `change`
    step: float = 0.0  # sizes are multiples of this
    starts: Sequence[int] = SEARCHED
    smallest: float | None = None  # size that made the robot fall; None: not even `largest` did
    held: float = 0.0  # largest size without a fall
    worst: tuple[str, int] = ("", 0)  # way and start of the fall at `smallest`

    def row(self) -> dict[str, Any]:
        """Return the result for stress.json; without a fall, `smallest` is None."""
        names, (way, start) = ("kind", "label", "unit", "smallest", "held", "largest"), self.worst
        return {**{name: getattr(self, name) for name in names}, "way": way, "phase": start % PHASES / PHASES}

    def trials(self, size: float, candidates: Iterable[tuple[str, int]]) -> list[Trial]:
        """Return trials of a size, in the given ways and from the given starts."""
        return [(start, self.kind, self.value(size), self.ways[way]) for way, start in candidates]

    def bisect(self) -> Trials:
        """Find `smallest`; ways and starts that led to a fall stay candidates for smaller sizes."""
        size, candidates = self.largest, [*product(self.ways, self.starts)]
        for _ in range(1 + (PUSH_HALVINGS if self.kind == "push" else HALVINGS)):
            fell = yield self.trials(size, candidates)
            if not fell.any():
                self.held = size
            else:
                self.smallest, self.worst = size, candidates[int(fell.argmax())]
                if size < self.largest:  # a later disturbance may fell those that the largest does not
                    candidates = [*compress(candidates, fell)]
            size = (self.held + (self.smallest or 0.0)) / 2.0
            size = math.floor(size / self.step + 1e-6) * self.step if self.step else size
            if size <= self.held + 1e-9:
                break
        yield []

    def confirm(self) -> Trials:
        """Try smaller pushes from all starts, as falls are not monotonic in size."""
        candidates = [*product(self.ways, range(WALKING * PHASES))]
        while self.held > 0.0 and (fell := (yield self.trials(self.held, candidates))).any():
            self.smallest, self.worst = self.held, candidates[int(fell.argmax())]
            self.held = max(0.0, self.held - self.largest / 2**PUSH_HALVINGS)
        yield []


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
        walkers: Robots, at least twice as many as `WALKING`.
        seed: Seed of initial states, commands and random pushes; equal seeds give equal experiments for all policies.
    """

    def __init__(self, walkers: Walkers, seed: int = 0) -> None:
        self.walkers, self.seed = walkers, seed
        if "x" not in walkers.ranges:
            got = ", ".join(walkers.ranges) or "none"
            raise ConfigError("the policy takes no command x", key=str(walkers.folder), got=got)
        unknown = {name: (SPEED * (name == "x"),) * 2 for name in walkers.ranges}
        self.ends = np.array([ends or unknown[name] for name, ends in walkers.ranges.items()]).T  # [2, commands]
        self.command = np.clip([speed for speed, _ in unknown.values()], *self.ends)
        self.standing = float(walkers.card["start"]["qpos"][walkers.root + 2])
        self.period_s, self.fell_s = 0.0, 0.0  # gait period; time of a fall without a disturbance, or 0
        self._walk()
        if self.fell_s and walkers.policy == "file":
            problem = f"the policy falls undisturbed, after {self.fell_s:.1f} s"
            raise ConfigError(problem, key=str(walkers.folder), hint="Try gpusim-rl play, or another checkpoint")

    def _walk(self) -> None:
        """Walk until the gait is regular, then save the robots at each phase of the gait."""
        walkers, rows, trace = self.walkers, np.arange(WALKING), list[np.ndarray]()
        self._begin(np.random.default_rng(self.seed), np.tile(self.command, (WALKING, 1)))

        def step() -> None:
            walkers.step(np.arange(walkers.num) < WALKING)
            trace.append(walkers.qpos[rows])

        for number in range(round(WALK_S * walkers.control_hz)):
            step()
            if walkers.fallen(self.standing)[rows].any():
                self.fell_s = (number + 1) * walkers.dt
                return
        regular = np.array(trace)[len(trace) // 3 :]
        self.standing = float(np.median(regular[..., walkers.root + 2]))
        period, phase = gait(np.diff(regular[..., walkers.qpos_of], axis=0), walkers.control_hz)
        self.period_s = period * walkers.dt
        wait = np.rint(np.mod(np.arange(PHASES) / PHASES - phase[:, None], 1.0) * period).astype(int)  # steps
        self._starts_at = (len(trace) - 1 + wait).ravel()
        starts = dict[tuple[int, int], list[np.ndarray]]()
        for number in range(wait.max() + 1):
            starts |= {(robot, i): walkers.save(rows[robot : robot + 1]) for robot, i in np.argwhere(wait == number)}
            step()
        self._trace = np.array(trace)
        self.starts = [np.concatenate(values) for values in zip(*(starts[key] for key in sorted(starts)), strict=True)]

    def _begin(self, rng: np.random.Generator, commands: np.ndarray) -> list[np.ndarray]:
        """Start and save an episode for each command: the card's start with random joint positions."""
        walkers, rows = self.walkers, np.arange(len(commands))
        walkers.restore()
        walkers.reset(rows)
        noise = rng.uniform(-START_NOISE, START_NOISE, (len(rows), len(walkers.qpos_of)))
        walkers.qpos[rows[:, None], walkers.qpos_of] += noise
        walkers.command[rows] = commands
        return walkers.save(rows)

    def _disturb(self, starts: list[np.ndarray], trials: Sequence[Trial]) -> np.ndarray:
        """Set a robot to the start of each trial and disturb it; return their indices."""
        rows = np.arange(len(trials))
        self.walkers.restore()
        self.walkers.load(rows, [values[[start for start, *_ in trials]] for values in starts])
        for row, (_, kind, value, way) in enumerate(trials):
            change(self.walkers, rows[row : row + 1], kind, value, way)
        return rows

    def run(self, starts: list[np.ndarray], trials: Sequence[Trial], seconds: float = AFTER_S) -> np.ndarray:
        """Simulate trials until the robot falls, from saved `starts`, as many as possible at once.

        Return whether it fell, 0 or 1, and the mean error of its horizontal velocity [m/s], [2, trials].
        """
        walkers, results = self.walkers, [np.zeros((2, 0))]
        columns = [walkers.commands.index(name) for name in "xy" if name in walkers.commands]
        for first in range(0, len(trials), walkers.num):
            rows = self._disturb(starts, trials[first : first + walkers.num])
            active, error, steps = np.arange(walkers.num) < len(rows), np.zeros(walkers.num), np.zeros(walkers.num)
            for _ in range(round(seconds * walkers.control_hz)):
                walkers.step(active)
                active &= ~walkers.fallen(self.standing)
                wrong = walkers.velocity[active, : len(columns)] - walkers.command[active][:, columns]
                error[active] += np.linalg.norm(wrong, axis=1)
                steps += active
            results.append(np.stack([(~active[rows]).astype(float), (error / np.maximum(steps, 1.0))[rows]]))
        return np.concatenate(results, axis=1)

    def search(self, searches: Sequence[SizeSearch]) -> None:
        """Bisect all searches in parallel, then confirm the smallest pushes."""
        self._conduct(search.bisect() for search in searches)
        pushes = [search for search in searches if search.kind == "push" and search.smallest is not None]
        weakest = sorted(pushes, key=lambda search: search.smallest or math.inf)[:CONFIRMED]
        self._conduct(search.confirm() for search in weakest)

    def _conduct(self, experiments: Iterable[Trials]) -> None:
        """Conduct experiments, with the trials of all of them at once."""
        asked = [(experiment, next(experiment)) for experiment in experiments]
        while asked := [(experiment, trials) for experiment, trials in asked if trials]:
            fell, _ = self.run(self.starts, [trial for _, trials in asked for trial in trials])
            parts = np.split(fell, np.cumsum([len(trials) for _, trials in asked])[:-1])
            asked = [(experiment, experiment.send(part)) for (experiment, _), part in zip(asked, parts, strict=True)]

    def push_rate(self, size: float, episodes: int) -> dict[str, Any]:
        """Return the row of falls after pushes of one size, in random directions and phases."""
        rng = np.random.default_rng(self.seed)
        angles, starts = rng.uniform(0.0, math.tau, episodes), rng.integers(WALKING * PHASES, size=episodes)
        trials = [(start, "push", size, heading(angle)) for angle, start in zip(angles, starts, strict=True)]
        return rate(f"falls_push_{size:g}", int(self.run(self.starts, trials)[0].sum()), episodes)

    def variants(
        self, each: int, seconds: float = EPISODE_S, groups: Iterable[str] = VARIANTS
    ) -> list[tuple[dict[str, Any], float]]:
        """Return falls, and the mean velocity error [m/s], in unchanged and in changed physics, see `VARIANTS`.

        Episodes start on the spot; all variants have the same initial states and random commands.
        """
        walkers, rng, results = self.walkers, np.random.default_rng(self.seed), list[np.ndarray]()
        able = [group for group in groups if group in ("delay", "noise") or factors(walkers.model, group, 2.0)]
        cases = [(group, value) for group in able for value in VARIANTS[group]]
        for first in range(0, each, walkers.num):
            number = min(walkers.num, each - first)
            starts = self._begin(rng, rng.uniform(self.ends[0], self.ends[1], (number, len(self.command))))
            trials = [(start, *case, None) for start in range(number) for case in (("delay", 0.0), *cases)]
            results.append(self.run(starts, trials, seconds).reshape(2, number, -1))
        fell, errors = np.concatenate(results, axis=1)
        names = ["plain", *(variant_name(group, value, walkers.control_hz) for group, value in cases)]
        rates = [rate(name, int(count), each) for name, count in zip(names, fell.sum(axis=0), strict=True)]
        return [*zip(rates, errors.mean(axis=0).tolist(), strict=True)]

    def replay(self, search: SizeSearch) -> dict[str, Any]:
        """Return rate and positions of the fall that a search found, from a second before the disturbance."""
        walkers, (way, start), hz = self.walkers, search.worst, self.walkers.control_hz
        assert search.smallest is not None
        self._disturb(self.starts, search.trials(search.smallest, [(way, start)]))
        frames = [*self._trace[self._starts_at[start] - round(hz) : self._starts_at[start], start // PHASES]]
        while np.isfinite(walkers.qpos[0]).all() and len(frames) < round(hz) + round(AFTER_S * hz):
            frames.append(walkers.qpos[0].copy())
            walkers.step(np.arange(walkers.num) == 0)
        every = max(1, round(hz / REPLAY_HZ))
        return {"hz": hz / every, "qpos": np.round(frames[::every], 4).tolist()}

    def searches(self) -> list[SizeSearch]:
        """Return the searches of a stress test, eight of them pushes."""
        walkers, model, world = self.walkers, self.walkers.model, ", ".join(self.walkers.world_terms)
        mass, tick = float(model.body_subtreemass[walkers.base]), 1000.0 / walkers.control_hz
        sides = {f"from {side}": heading(math.tau / 8.0 * i) for i, side in enumerate(SIDES)}
        quarters, longest = [*sides.items()][::2], walkers.max_delay * tick
        limits = [(i, name, float(end)) for i, name in enumerate(walkers.commands) for end in self.ends[:, i]]
        commands = {f"{name} to {end:.3g}": (i, end) for i, name, end in limits}
        motors = {model.actuator(i).name or f"actuator {i}": i for i in range(model.nactuator)}
        slopes = {name: way for name, (_, way) in zip(SLOPES, quarters, strict=True) if not world}
        untested = f"not tested: {world} in the world frame" if world else ""
        found = [SizeSearch("push", f"push {side}", "m/s", LARGEST_PUSH, {side: way}) for side, way in sides.items()]
        for s in FORCES_S:
            ways = {side: (way, s) for side, way in quarters}
            found.append(SizeSearch("force", f"force for {s:g} s", "N", LARGEST_PUSH * mass / s, ways))
        return [
            *found,
            SizeSearch("payload", "payload", "kg", mass, {"on the torso": None}),
            SizeSearch("command", "command step", "% of range", 100.0, commands, lambda size: size / 100.0),
            SizeSearch("friction", "less friction", "%", 95.0, {"all contacts": None}, lambda size: 1.0 - size / 100.0),
            SizeSearch("delay", "delay", "ms", longest, {"all controls": None}, lambda size: round(size / tick), tick),
            SizeSearch("motor", "weak motor", "%", 100.0, motors, lambda size: 1.0 - size / 100.0, starts=[0]),
            SizeSearch("slope", "slope", "degrees", 30.0 * bool(slopes), slopes, math.radians, worst=(untested, 0)),
        ]


def heading(angle: float) -> np.ndarray:
    """Return a horizontal direction (forward, left, up), counter-clockwise from forward [rad]."""
    return np.array([math.cos(angle), math.sin(angle), 0.0])


def gait(speeds: np.ndarray, hz: float) -> tuple[float, np.ndarray]:
    """Return the period of a gait [steps], and each robot's phase after the last step, 0 to 1, [robots].

    `speeds` are joint velocities, [steps, robots, joints], with `hz` steps per second.
    """
    x = speeds - speeds.mean(axis=0)
    first, last = (round(seconds * hz) for seconds in PERIOD_S)
    lags = range(max(2, first), min(last, len(x) // 2))
    pairs = [(x[:-lag], x[lag:]) for lag in lags]
    alike = [np.vdot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b) + 1e-9) for a, b in pairs]
    peaks = [i for i in range(1, len(lags) - 1) if alike[i] >= max(*alike[i - 1 : i + 2], 0.9 * max(alike))]
    period = float(lags[peaks[0] if peaks else int(np.argmax(alike))])
    steps = np.arange(-round(2 * period), 0)
    waves = np.einsum("t,trj->rj", np.exp(-2j * np.pi * steps / period), x[steps])
    joint = int(np.abs(waves).mean(axis=0).argmax())
    return period, np.mod(np.angle(waves[:, joint]) / math.tau, 1.0)


def stress(folder: Path, seed: int = 0, episodes: int = EPISODES) -> dict[str, Any]:
    """Stress the policy of an export folder, and its baselines by pushes; return the content of stress.json."""
    walkers = Walkers(folder, ROBOTS, seed)
    study = StressTest(walkers, seed)
    study.search(searches := study.searches())
    changed = [row for row, _ in study.variants(math.ceil(episodes / 8))]
    total = rate("falls", *(sum(row[key] for row in changed) for key in ("falls", "episodes")))
    rates = [total, *(study.push_rate(size, episodes) for size in PUSHES), *changed]
    fell = [search for search in searches if search.smallest is not None]
    worst = min(fell, key=lambda it: (it.kind != "push", (it.smallest or 0.0) / it.largest), default=None)
    replay = None if worst is None else {**worst.row(), **study.replay(worst)}
    zero = baseline(walkers, "zero", seed, episodes)
    hold = zero if walkers.holds_at_zero else baseline(walkers, "hold", seed, episodes)
    return {
        "task": str(walkers.card.get("task")),
        "seed": seed,
        "command": dict(zip(walkers.commands, study.command.tolist(), strict=True)),
        "standing_height_m": study.standing,
        "gait_period_s": study.period_s,
        "searches": [search.row() for search in searches],
        "rates": rates,
        "worst": replay,
        "baselines": {"zero": zero, "hold": hold},
    }


def baseline(walkers: Walkers, policy: Literal["zero", "hold"], seed: int, episodes: int) -> dict[str, Any]:
    """Return the pushes that a robot with constant targets withstands."""
    walkers.policy = policy
    study = StressTest(walkers, seed)
    searches = [] if study.fell_s else [search for search in study.searches() if search.kind == "push"]
    study.search(searches)
    rates = [study.push_rate(size, episodes) for size in (() if study.fell_s else PUSHES)]
    return {"fell_s": study.fell_s, "searches": [search.row() for search in searches], "rates": rates}
