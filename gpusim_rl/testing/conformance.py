"""Conformance suite for tasks; subclass it in your package's tests.

    from gpusim_rl.testing.conformance import TaskConformance


    class TestMyTasks(TaskConformance):
        config_dir = "my_cfg"

pytest then runs every check on every task of `my_cfg/task`; ids are task names (`pytest -k Reacher`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import mujoco
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gpusim_rl.api import prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.env.stateful import kept_tensors
from gpusim_rl.env.task import Task, load_task_or_environment
from gpusim_rl.env.vec_env import VecEnv
from gpusim_rl.run.held_objects import unsaved
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.settings import discover
from gpusim_rl.settings.checks import build, settings_class
from gpusim_rl.settings.compose import compose
from gpusim_rl.settings.schema import ALGORITHMS, TASK_DEFAULTS, RunConfig, SimConfig
from gpusim_rl.settings.simulators import SIMULATORS, default_simulator
from gpusim_rl.sim import Scene, choose_sim, make_sim, put_pose
from gpusim_rl.testing.measurable import simulator_only
from gpusim_rl.testing.mirror_check import WRONG, differences_by_term
from gpusim_rl.testing.sync_counter import SyncCounter

NUM = 4  # default number of envs in a check
SHORT = 6  # episode length [control steps] in checks where episodes must end
CPU = torch.device("cpu")
SMALL_PPO = {"horizon": 8, "epochs": 2, "minibatch_size": 16, "network": {"hidden": [16, 16], "rnn_size": 8}}


class TaskConformance:
    """Checks of tasks, collected from subclasses named `Test...`; `test_... = None` disables one.

    Attributes:
        config_dir: Folder with `task/<Name>.yaml`, as for `-cd`; None for the installed tasks.
        tasks: Names to check; None for all.
        simulators: Simulators on which every task must train.
        touching: Tasks whose initial states may exceed joint limits or penetrate.
        constant: Observation terms that may be constant, by task.
        max_steps: Control steps within which every observed value must change.
    """

    config_dir: ClassVar[str | Path | None] = None
    tasks: ClassVar[Sequence[str] | None] = None
    simulators: ClassVar[Sequence[str]] = tuple(s.name for s in SIMULATORS.values() if s.extra is None)
    touching: ClassVar[Sequence[str]] = ()
    constant: ClassVar[Mapping[str, Sequence[str]]] = {}
    max_steps: ClassVar[int] = 1500

    @classmethod
    def entries(cls) -> dict[str, discover.TaskEntry]:
        """Return the tasks to check, by name."""
        entries = _entries(cls.config_dir)
        if cls.tasks is not None:
            return {name: entries[name] for name in cls.tasks}
        if cls.config_dir is None:
            return entries
        folder = Path(cls.config_dir, "task")
        return {name: entry for name, entry in entries.items() if entry.file.parent == folder}

    @classmethod
    def trainings(cls) -> Iterable[Any]:
        """Return task and simulator of each training run, for `pytest.mark.parametrize`."""
        return [(name, sim) for name in cls.entries() for sim in cls.simulators]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise checks by task name."""
        if "sim" in metafunc.fixturenames:
            metafunc.parametrize(("name", "sim"), list(self.trainings()))
        elif "name" in metafunc.fixturenames:
            metafunc.parametrize("name", list(self.entries()))

    def make_env(self, name: str, *, num_envs: int = NUM, seed: int = 0, **settings: Any) -> VecEnv:
        """Build a task's envs on the CPU; `settings` override its `task` section."""
        composed = _composed(name, self.config_dir)
        task_class = load_task_or_environment(composed["task"]["_target_"])
        section = {key: value for key, value in composed["task"].items() if key != "_target_"}
        cfg = build(settings_class(task_class), {**section, **settings}, "task")
        sim_cfg = build(SimConfig, composed["sim"], "sim")
        choice = choose_sim(default_simulator("cpu").name, CPU)
        return VecEnv(task_class, cfg, make_sim(_scene(task_class, cfg), choice, num_envs, sim_cfg), seed)

    def started_env(self, name: str, **settings: Any) -> VecEnv:
        """Build envs and reset them."""
        env = self.make_env(name, **settings)
        env.reset()
        return env

    def make_trainer(self, name: str, folder: Path, **overrides: Any) -> Trainer:
        """Build a trainer for a small run in `folder`, on the CPU."""
        small = {"device": "cpu", "num_envs": NUM, "max_iterations": 2, "ppo": SMALL_PPO}
        settings = merged(small, {"log": {"dir": str(folder), "console": "quiet"}}, overrides)
        return make_trainer(prepare(name, config_dir=self.config_dir, **settings))

    # Configuration

    def test_yaml_sets_every_config_field_and_nothing_else(self, name: str) -> None:
        fields = {field.name for field in dataclasses.fields(settings_class(self._task_class(name)))}
        assert set(self._yaml(name)["task"]) | set(TASK_DEFAULTS) == {"_target_", *fields}

    def test_config_class_has_no_defaults(self, name: str) -> None:
        fields = dataclasses.fields(settings_class(self._task_class(name)))
        missing = dataclasses.MISSING
        defaults = [f for f in fields if f.default is not missing or f.default_factory is not missing]
        assert [f.name for f in defaults][: len(TASK_DEFAULTS)] == list(TASK_DEFAULTS), "differs from cfg/config.yaml"
        # a default of None keeps runs older than the field readable
        assert [f.name for f in defaults[len(TASK_DEFAULTS) :] if f.default is not None] == []

    def test_yaml_keys_reach_the_composed_settings(self, name: str) -> None:
        # below a comment, Hydra would ignore the package line
        assert self.entries()[name].file.read_text().startswith("# @package _global_\n")
        composed = _composed(name, self.config_dir)
        plain = _composed(None, None)
        expected: Any = OmegaConf.to_container(OmegaConf.create(merged(plain, self._yaml(name))), resolve=True)
        assert differences(expected, composed) == []
        assert expected.keys() - ALGORITHMS.keys() == {*plain, "task"} - ALGORITHMS.keys()
        assert expected["ppo"].keys() == plain["ppo"].keys()

    def test_recipes_keep_observations_and_actions(self, name: str) -> None:
        full, own = _composed(name, self.config_dir), {field.name for field in dataclasses.fields(RunConfig)}
        fits = operator.attrgetter("obs_sizes", "images", "num_actions")
        for recipe in discover.recipes(name, self.config_dir)[1:]:
            changed = compose([f"task={name}", f"recipe={recipe}"], self.config_dir)
            keys = {key for key, value in changed.items() if value != full[key]}
            assert keys & own <= {"recipe", "num_envs", "max_iterations", "task"}, "docs/tasks.md#recipes"
            for key in ("_target_", "physics_hz", "control_hz", "clip_actions", "clip_observations"):
                assert changed["task"][key] == full["task"][key], f"docs/tasks.md#recipes: {recipe} changes task.{key}"
            settings = {key: value for key, value in changed["task"].items() if key != "_target_"}
            assert fits(self.make_env(name, num_envs=1, **settings)) == fits(self.make_env(name, num_envs=1))

    def test_class_docstring_matches_observations_and_actions(self, name: str) -> None:
        env = self.started_env(name, num_envs=1)
        docstring = inspect.getdoc(type(env.task)) or ""
        assert docstring.splitlines()[0].startswith(f"{name}: ")
        for word in ("Action space:", "Observation space:", "Reward", "Start:", "ermination"):
            assert word in docstring, f"no {word!r} in the docstring"
        count = re.search(r"Action space: (\d+) number", docstring)
        assert count and int(count.group(1)) == env.num_actions
        # One table per observation group, in order; the first column numbers all elements without gaps.
        # Each named term is a row; a row with the name of another group stands for that group's terms.
        tables: list[list[tuple[range, str, str]]] = []
        for line in docstring.splitlines():
            if re.match(r"\| *num *\|( *name *\|)? *observation *\| *unit *\|$", line):
                tables.append([])
            elif row := re.match(r"\| *(\d+)(?:-(\d+))? *\| *(.*?) *\|.*\S.*\| *(.*\S) *\|$", line):
                first, last, term, unit = row.groups()
                tables[-1].append((range(int(first), int(last or first) + 1), term, unit))
        covered = [[number for row in table for number in row[0]] for table in tables]
        sizes = {group: size for group, size in env.obs_sizes.items() if size}
        assert covered == [list(range(size)) for size in sizes.values()]
        assert all(f"`{group}`" in docstring for group in env.images), "an image group is missing"
        named = {g: [(x.name, x.size * x.history, x.unit) for x in terms] for g, terms in env.obs_terms.items()}
        for table, group in zip(tables, sizes, strict=True):
            if group in named:
                others = {other: rows for other, rows in named.items() if other != group}
                documented = [others.get(term, [(term, len(numbers), unit)]) for numbers, term, unit in table]
                assert [row for rows in documented for row in rows] == named[group]

    # MDP

    def test_shapes_types_and_devices(self, name: str) -> None:
        env = self.started_env(name)  # checks them in every step
        for action in random_actions(env, 3):
            step = env.step(action)
            values = [*step.obs.values(), *step.final_obs.values(), *step.terms.values()]
            assert all(value.isfinite().all() for value in values)

    def test_same_seed_repeats_and_other_seed_differs(self, name: str) -> None:
        one, two, other = (self.make_env(name, seed=seed, episode_length=SHORT) for seed in (1, 1, 2))
        starts = [env.reset() for env in (one, two, other)]
        assert differences(starts[0], starts[1]) == []
        assert not torch.equal(joined(starts[0]), joined(starts[2]))
        for action in random_actions(one, 10):
            first, second = one.step(action), two.step(action)
            for field in first.__slots__:
                assert differences(getattr(first, field), getattr(second, field)) == [], field
        assert differences(one.state_dict(), two.state_dict()) == []

    def test_start_states_differ_between_envs_and_episodes(self, name: str) -> None:
        env = self.make_env(name, num_envs=8, episode_length=2, randomize_episode_start=False)
        starts = [joined(env.reset())]
        for action in random_actions(env, 6):
            step = env.step(action)
            if step.done.all():
                starts.append(joined(step.obs))
        assert len(starts) >= 3
        envs = torch.cat(starts)
        assert len(envs.unique(dim=0)) == len(envs), "two episodes have the same initial state"

    def test_start_states_do_not_penetrate_or_exceed_joint_limits(self, name: str) -> None:
        if name in self.touching:
            pytest.skip("listed in `touching`")
        env = self.started_env(name, num_envs=64)
        model = env.sim.scene.model
        data = mujoco.MjData(model)
        limited = model.jnt_limited.astype(bool)
        address, (low, high) = model.jnt_qposadr[limited], model.jnt_range[limited].T
        for pose in env.sim.poses.double().numpy():
            qpos = pose[: model.nq]
            assert (qpos[address] >= low - 1e-6).all() and (qpos[address] <= high + 1e-6).all()
            put_pose(model, data, pose)
            mujoco.mj_fwdPosition(model, data)
            assert all(contact.dist > -0.005 for contact in data.contact), [contact.geom for contact in data.contact]

    def test_no_observation_element_is_constant(self, name: str) -> None:
        env = self.make_env(name, num_envs=16)
        obs = env.reset()
        groups = sorted(obs.keys() - env.images.keys())
        elements: list[str] = []  # `<group>/<term>`, or `<group>/<index>` in a group without terms
        for group in groups:
            terms = [term.name for term in env.obs_terms.get(group, ()) for _ in range(term.size * term.history)]
            elements += [f"{group}/{term}" for term in terms or range(obs[group].shape[1])]
        constant = self.constant.get(name, ())
        may_rest = torch.tensor([element.partition("/")[2] in constant for element in elements], dtype=torch.bool)
        seen = joined({group: obs[group] for group in groups})
        low, high, still = seen.amin(dim=0), seen.amax(dim=0), ~may_rest
        for action in random_actions(env, self.max_steps):
            step = env.step(action)
            seen = joined({group: step.obs[group] for group in groups})
            low, high = torch.minimum(low, seen.amin(dim=0)), torch.maximum(high, seen.amax(dim=0))
            still = (high - low < 1e-6) & ~may_rest
            if not still.any():
                return
        names = [element for element, rests in zip(elements, still.tolist(), strict=True) if rests]
        pytest.fail(f"constant over {self.max_steps} steps of {env.num_envs} envs: {names}")

    def test_sources_exist_in_the_scene(self, name: str, record_property: Callable[[str, str], None]) -> None:
        env = self.started_env(name)
        record_property("only a simulator provides", ", ".join(simulator_only(env)))

    def test_reward_is_the_sum_of_its_terms(self, name: str) -> None:
        env = self.started_env(name, episode_length=SHORT)
        names: set[tuple[str, ...]] = set()
        for action in random_actions(env, 10):
            step = env.step(action)
            names.add(tuple(step.terms))
            torch.testing.assert_close(step.reward, torch.stack(list(step.terms.values())).sum(dim=0))
        assert len(names) == 1, "term names change between steps"
        (terms,) = names
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", term) for term in terms), terms

    def test_final_obs_equals_run_without_resets(self, name: str) -> None:
        env, endless = (self.started_env(name, episode_length=SHORT) for _ in range(2))
        begin, nowhere = endless.begin_episodes, torch.zeros(NUM, dtype=torch.bool)
        endless.begin_episodes = lambda where: begin(nowhere)  # type: ignore[assignment] # draws the same random numbers
        alive = torch.ones(NUM, dtype=torch.bool)
        ended = 0
        for action in random_actions(env, SHORT + 1):
            real, free = env.step(action), endless.step(action)
            for group, value in real.final_obs.items():
                assert torch.equal(value[alive], free.final_obs[group][alive])
                continues = alive & ~real.done
                assert torch.equal(real.obs[group][continues], free.obs[group][continues])
            assert torch.equal(real.reward[alive], free.reward[alive])
            ended += int((alive & real.done).sum())
            alive &= ~real.done
        assert ended == NUM

    def test_observe_and_terminated_have_no_side_effects(self, name: str) -> None:
        env = self.started_env(name, episode_length=SHORT)
        for action in random_actions(env, SHORT + 1):
            env.step(action)
            before = copied(env.state_dict())
            first, end = env._observe(), env.task.terminated().clone()
            assert differences(first, env._observe()) == []
            assert torch.equal(end, env.task.terminated())
            assert differences(before, env.state_dict()) == []

    def test_returned_tensors_are_never_overwritten(self, name: str) -> None:
        env = self.started_env(name, episode_length=SHORT)
        returned = []
        for action in random_actions(env, 8):
            step = env.step(action)
            fields = [getattr(step, field) for field in step.__slots__]
            returned += leaves([value for value in fields if value is not None])
        copies = [value.clone() for _, value in returned]
        for action in random_actions(env, 8, seed=1):
            env.step(action)
        assert [path for (path, value), copy in zip(returned, copies, strict=True) if not same(value, copy)] == []

    def test_task_state_is_tensors_written_in_place(self, name: str) -> None:
        env = self.started_env(name, episode_length=SHORT)
        tensors = {path: value.data_ptr() for path, value in kept_tensors(vars(env.task))}
        others = unsaved(env.task)
        for action in random_actions(env, 14):
            env.step(action)
        moved = {path: value.data_ptr() for path, value in kept_tensors(vars(env.task))}
        assert moved == tensors, "replaced instead of written in place"
        # a CUDA graph would freeze it, and checkpoints lack it
        assert unsaved(env.task) == others, "changes between steps, but is not a tensor of the task"

    def test_restored_env_continues_bit_identically(self, name: str) -> None:
        env, other = (self.started_env(name, episode_length=SHORT, seed=seed) for seed in (0, 9))
        actions = list(random_actions(env, 14))
        for action in actions[:4]:
            env.step(action)
        state, seen = copied(env.state_dict()), env._obs
        later = [env.step(action) for action in actions[4:]]
        assert differences(other.load_state_dict(state), seen) == []
        for action, expected in zip(actions[4:], later, strict=True):
            step = other.step(action)
            for field in step.__slots__:
                assert differences(getattr(expected, field), getattr(step, field)) == [], field
        assert differences(env.state_dict(), other.state_dict()) == []

    def test_diverged_env_is_reset_without_affecting_others(self, name: str) -> None:
        env, calm = self.started_env(name), self.started_env(name)
        robot = env.sim.articulation(env.sim.scene.articulation_names[0])
        victim = torch.arange(NUM) == 2
        broken = 0
        for count, action in enumerate(random_actions(env, 6)):
            if count == 2:
                robot.set_state(victim, joint_vel=torch.full_like(robot.joint_vel, 1e8))
            step, undisturbed = env.step(action), calm.step(action)
            broken += int(step.diverged.sum())
            assert torch.equal(step.diverged, victim & (count == 2))
            assert all(value.isfinite().all() for value in [*step.obs.values(), *step.final_obs.values(), step.reward])
            for group, value in step.obs.items():
                assert torch.equal(value[~victim], undisturbed.obs[group][~victim])
            assert torch.equal(step.reward[~victim], undisturbed.reward[~victim])
        assert broken == 1

    def test_envs_can_be_randomized(self, name: str) -> None:
        scene = self.make_env(name, num_envs=1).sim.scene
        factor = {"range": [0.8, 1.2], "operation": "scaling", "distribution": "uniform"}
        masses = {
            actor: {"rigid_body_properties": {"mass": factor}}
            for actor in scene.articulation_names
            if scene.model.body_mass[scene.bodies_of(actor)].any()
        }
        noise = {"range": [0.0, 0.01], "operation": "additive", "distribution": "gaussian"}
        params = {"observations": noise, "actions": noise, "latency": {"range": [0, 1]}, "actor_params": masses}
        env = self.make_env(name, episode_length=4, randomize=True, randomization_params=params)
        obs = env.reset()
        assert torch.isfinite(joined(obs)).all()
        assert not env.obs_sizes["policy"] or not torch.equal(obs["policy"], env.clean_obs()["policy"])
        for action in random_actions(env, 9):
            step = env.step(action)
            assert torch.isfinite(joined(step.obs)).all() and not step.diverged.any()
        for actor in masses:
            mass = env.sim.param("body_mass", actor).value
            assert (mass.amax(dim=0) > mass.amin(dim=0)).any(), actor

    def test_mirror_image_moves_like_the_original(self, name: str) -> None:
        env = self.started_env(name, num_envs=16, observations={}, clip_actions=1e6, clip_observations=None)
        if not env.task.mirrors:
            pytest.skip("the task defines no mirror image")
        found = differences_by_term(env)
        assert {term: x for term, x in found.items() if x is not None and x > WRONG} == {}, "wrong kind or sign"

    # Run

    def test_iteration_has_no_host_sync(self, name: str, tmp_path: Path) -> None:
        """Count syncs, except those of CPU physics, checkpoints and log rows."""
        trainer = self.make_trainer(name, tmp_path, max_iterations=3, log={"interval": 1000})
        with trainer.logging() as log:
            trainer.iterate(log)  # one-off work
            syncs = SyncCounter()
            assert isinstance(trainer.env, VecEnv)
            sim = trainer.env.sim
            log.checkpoints.due = lambda *_: False  # pyright: ignore[reportAttributeAccessIssue] slow iterations save
            for method in ("step", "reset", "refresh", "draw"):
                setattr(sim, method, syncs.pause()(getattr(sim, method)))
            with syncs:
                trainer.iterate(log)
        assert syncs.total == 0, syncs.locations
        assert all(value.isfinite().all() for value in trainer.algorithm.policy.state_dict().values())

    def test_task_trains_on_every_simulator(self, name: str, sim: str, tmp_path: Path) -> None:
        if SIMULATORS[sim].extra is not None:
            pytest.importorskip(SIMULATORS[sim].library)
        trainer = self.make_trainer(name, tmp_path, sim=sim)
        row = trainer.train()
        assert trainer.start.sim.name == sim and row["iteration"] == 2
        assert all(value.isfinite().all() for value in trainer.algorithm.policy.state_dict().values())
        assert row["sim/diverged"] == 0 and row["sim/overflow"] == 0

    def _task_class(self, name: str) -> type[Task[Any]]:
        return load_task_or_environment(self.entries()[name].target)

    def _yaml(self, name: str) -> dict[str, Any]:
        """Return a task's yaml merged over its bases (`defaults: [Ant]`)."""
        content = discover.read_yaml(_entries(self.config_dir)[name].file)
        bases = [base for base in content.pop("defaults", []) if isinstance(base, str) and base != "_self_"]
        return merged(*map(self._yaml, bases), content)


@functools.cache
def _entries(config_dir: str | Path | None) -> dict[str, discover.TaskEntry]:
    return discover.tasks(config_dir)


@functools.cache
def _composed(name: str | None, config_dir: str | Path | None) -> dict[str, Any]:
    """Return composed settings, cached and read-only, since composing takes most of a short check's time."""
    return compose(["~task" if name is None else f"task={name}", f"recipe={discover.FULL}"], config_dir)


_scenes: dict[tuple[type, str], Scene] = {}


def _scene(task_class: type[Task[Any]], cfg: Any) -> Scene:
    """Return a task's scene, compiled once per configuration."""
    key = (task_class, repr(cfg))
    if key not in _scenes:
        _scenes[key] = task_class.scene(cfg)
    return _scenes[key]


def random_actions(env: VecEnv, steps: int, seed: int = 0) -> Iterator[Tensor]:
    """Yield actions, redrawn every step in half of the envs, held for 20 steps in the rest; some exceed the limits."""
    random = torch.Generator().manual_seed(seed)
    held = torch.zeros(env.num_envs, env.num_actions)
    for step in range(steps):
        new = 2.4 * torch.rand(held.shape, generator=random) - 1.2
        if step % 20 == 0:
            held = new.sign()
        jitters = (torch.arange(env.num_envs) % 2 == 0)[:, None]
        yield torch.where(jitters, new, held)


def cloned(state: Any) -> Any:
    """Return a state with copies of its tensors."""
    return tree_map_only(Tensor, torch.clone, state)


def copied(state: Any) -> Any:
    """Return a state copied through torch's file format."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def joined(obs: dict[str, Tensor]) -> Tensor:
    """Concatenate all observation groups, with images flattened."""
    return torch.cat([value.flatten(1).float() for value in obs.values()], dim=1)


def merged(*settings: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested settings; later ones take precedence."""
    result: dict[str, Any] = {}
    for section in settings:
        for key, value in section.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merged(result[key], value) if both else value
    return result


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every leaf in nested dicts and lists."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from leaves(value, f"{path}/{key}")
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from leaves(value, f"{path}/{index}")
    else:
        yield path, node


def differences(a: Any, b: Any) -> list[str]:
    """Return the paths at which two nested states differ."""
    first, second = dict(leaves(a)), dict(leaves(b))
    unequal = [path for path in first if path in second and not same(first[path], second[path])]
    return unequal + sorted(first.keys() ^ second.keys())


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal (tensors: in shape, dtype and all elements); NaN equals NaN."""
    if not isinstance(a, Tensor):
        return a == b
    equal = a.shape == b.shape and a.dtype == b.dtype
    return equal and bool(((a == b) | ((a != a) & (b != b))).all())
