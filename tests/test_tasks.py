"""What every task must satisfy: a new yaml in cfg/task is tested by this file without a line added to it."""

from __future__ import annotations

import dataclasses
import inspect
import io
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import mujoco
import pytest
import torch
from gpusim_rl.tasks.cartpole import Cartpole
from torch import Tensor

from gpusim_rl.api import prepare
from gpusim_rl.compose import compose
from gpusim_rl.config import TASK_DEFAULTS, config_class, load_task_class
from gpusim_rl.discover import read_yaml, tasks
from gpusim_rl.env import Task, TaskPart, VecEnv
from gpusim_rl.env.random import EnvRandom
from gpusim_rl.run.logger import Logger
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.sim import SimChoice
from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.training import differences, leaves, make_trainer, merged, same

CPU = torch.device("cpu")
TASKS = tasks()
NUM = 8
# Newton compiles its kernels anew for every scene: two scenes prove the protocol.
NEWTON = ("Cartpole", "Ant")
# Their starts are Gymnasium's to the last digit: joints a little beyond their limits, feet in the ground.
GYMNASIUM = ("HalfCheetah", "Hopper", "Walker2d")

every_task = pytest.mark.parametrize("name", TASKS)


def make_env(name: str, *, sim: str = "mujoco", num_envs: int = NUM, seed: int = 0, **settings: Any) -> VecEnv:
    run, task_class, _, _ = prepare(name, num_envs=num_envs, task=settings)
    choice = SimChoice(sim, CPU, "test")
    return VecEnv.make(task_class, run.task, num_envs=num_envs, choice=choice, sim=run.sim, seed=seed)


def random_actions(env: VecEnv, steps: int, seed: int = 0) -> Iterator[Tensor]:
    """Half of the envs jitter, the others push on for a while; now and then beyond the limits."""
    random = torch.Generator().manual_seed(seed)
    held = torch.zeros(env.num_envs, env.num_actions)
    for step in range(steps):
        new = 2.4 * torch.rand(held.shape, generator=random) - 1.2
        if step % 20 == 0:
            held = new.sign()
        jitters = (torch.arange(env.num_envs) % 2 == 0)[:, None]
        yield torch.where(jitters, new, held)


def copied(env: VecEnv) -> dict[str, Any]:
    """Everything that the next step depends on, in memory of its own."""
    buffer = io.BytesIO()
    torch.save(env.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def joined(obs: dict[str, Tensor]) -> Tensor:
    return torch.cat(list(obs.values()), dim=1)


# The configuration


def yaml_of(name: str) -> dict[str, Any]:
    return read_yaml(TASKS[name].file)


@every_task
def test_the_yaml_gives_a_value_to_every_field_and_to_nothing_else(name):
    fields = {field.name for field in dataclasses.fields(config_class(load_task_class(TASKS[name].target)))}
    assert set(yaml_of(name)["task"]) | set(TASK_DEFAULTS) == {"_target_", *fields}


@every_task
def test_the_yaml_is_the_only_place_with_values(name):
    fields = dataclasses.fields(config_class(load_task_class(TASKS[name].target)))
    missing = dataclasses.MISSING
    defaults = [f.name for f in fields if f.default is not missing or f.default_factory is not missing]
    assert defaults == list(TASK_DEFAULTS), "those of cfg/config.yaml, which every task shares"


@every_task
def test_every_key_of_the_yaml_lands_where_it_belongs(name):
    # A comment above the package line would silently put everything below task.
    assert TASKS[name].file.read_text().startswith("# @package _global_\n")
    composed = compose([f"task={name}"])
    plain = compose(["~task"])
    expected = merged(plain, yaml_of(name))
    assert differences(expected, composed) == []
    assert expected.keys() == {*plain, "task"} and expected["ppo"].keys() == plain["ppo"].keys()


@every_task
def test_the_class_docstring_is_the_specification(name):
    env = make_env(name, num_envs=1)
    env.reset()
    text = inspect.getdoc(type(env.task)) or ""
    assert text.splitlines()[0].startswith(f"{name}: ")
    for word in ("Action space:", "Observation space:", "Reward", "Start:", "ermination"):
        assert word in text, f"the docstring does not tell of {word!r}"
    count = re.search(r"Action space: (\d+) number", text)
    assert count and int(count.group(1)) == env.num_actions
    # One table for each group of observations, in their order; the first column numbers all elements without a gap.
    tables: list[list[range]] = []
    for line in text.splitlines():
        if re.match(r"\| *num *\| *observation *\| *unit *\|$", line):
            tables.append([])
        elif row := re.match(r"\| *(\d+)(?:-(\d+))? *\|.*\S.*\|.*\S.*\|$", line):
            tables[-1].append(range(int(row.group(1)), int(row.group(2) or row.group(1)) + 1))
    covered = [[number for row in table for number in row] for table in tables]
    assert covered == [list(range(size)) for size in env.obs_sizes.values()]


# The MDP


@every_task
def test_shapes_types_and_devices(name):
    env = make_env(name)
    obs = env.reset()
    assert env.num_actions >= 1 and "policy" in env.obs_sizes
    for action in random_actions(env, 3):
        step = env.step(action)
        for group in (obs, step.obs, step.final_obs):
            assert {key: value.shape for key, value in group.items()} == {
                key: (NUM, size) for key, size in env.obs_sizes.items()
            }
        floats = [*step.obs.values(), *step.final_obs.values(), *step.terms.values(), step.reward]
        masks = [step.terminated, step.truncated, step.diverged, step.done, step.incomplete]
        assert all(value.dtype == torch.float32 for value in floats)
        assert all(value.dtype == torch.bool for value in masks)
        assert all(value.device == env.device for value in floats + masks)
        assert all(value.shape == (NUM,) for value in [*step.terms.values(), step.reward, *masks])
        assert all(value.isfinite().all() for value in floats)
        assert env.task.terminated().dtype == torch.bool


@every_task
def test_a_seed_fixes_everything_and_another_seed_does_not(name):
    same, again, other = (make_env(name, seed=seed) for seed in (1, 1, 2))
    starts = [env.reset() for env in (same, again, other)]
    assert differences(starts[0], starts[1]) == []
    assert not torch.equal(joined(starts[0]), joined(starts[2]))
    for action in random_actions(same, 40):
        first, second = same.step(action), again.step(action)
        for field in first.__slots__:
            assert differences(getattr(first, field), getattr(second, field)) == [], field
    assert differences(copied(same), copied(again)) == []


@every_task
def test_starts_are_random_in_every_world_and_episode(name):
    env = make_env(name, episode_length=2, randomize_episode_start=False)
    starts = [joined(env.reset())]
    for action in random_actions(env, 6):
        step = env.step(action)
        if step.done.all():
            starts.append(joined(step.obs))
    assert len(starts) >= 3
    worlds = torch.cat(starts)
    for i in range(len(worlds)):
        assert not any(torch.equal(worlds[i], worlds[j]) for j in range(i)), "two episodes began alike"


@pytest.mark.parametrize("name", [name for name in TASKS if name not in GYMNASIUM])
def test_at_the_start_nothing_is_inside_anything_else_and_no_joint_beyond_its_limits(name):
    env = make_env(name, num_envs=128)
    env.reset()
    model = env.sim.scene.model
    data = mujoco.MjData(model)
    limited = model.jnt_limited.astype(bool)
    address, (low, high) = model.jnt_qposadr[limited], model.jnt_range[limited].T
    for qpos in env.sim.scene_qpos().double().numpy():
        assert (qpos[address] >= low - 1e-6).all() and (qpos[address] <= high + 1e-6).all()
        data.qpos[:] = qpos
        mujoco.mj_fwdPosition(model, data)
        assert all(contact.dist > -0.005 for contact in data.contact), [contact.geom for contact in data.contact]


@every_task
def test_no_element_of_an_observation_is_constant(name):
    env = make_env(name, num_envs=16)
    obs = env.reset()
    low = {group: value.amin(dim=0) for group, value in obs.items()}
    high = {group: value.amax(dim=0) for group, value in obs.items()}
    for step, action in enumerate(random_actions(env, 1500)):
        for group, value in env.step(action).obs.items():
            low[group] = torch.minimum(low[group], value.amin(dim=0))
            high[group] = torch.maximum(high[group], value.amax(dim=0))
        constant = {group: (high[group] - low[group] < 1e-6).nonzero().flatten().tolist() for group in obs}
        if step >= 100 and not any(constant.values()):
            return
    pytest.fail(f"constant over {step + 1} steps of 16 envs: {constant}")


@every_task
def test_the_reward_is_the_sum_of_its_named_terms(name):
    env = make_env(name)
    env.reset()
    names: set[tuple[str, ...]] = set()
    for action in random_actions(env, 50):
        step = env.step(action)
        names.add(tuple(step.terms))
        torch.testing.assert_close(step.reward, torch.stack(list(step.terms.values())).sum(dim=0))
    assert len(names) == 1, "the terms change from step to step"
    (terms,) = names
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", term) for term in terms), terms


@every_task
def test_final_obs_is_what_a_run_without_resets_sees(name):
    env, oracle = (make_env(name, episode_length=30) for _ in range(2))
    env.reset()
    oracle.reset()
    reset, nowhere = oracle._reset, torch.zeros(NUM, dtype=torch.bool)
    oracle._reset = lambda where: reset(nowhere)  # type: ignore[method-assign] # random streams go on alike
    alive = torch.ones(NUM, dtype=torch.bool)
    ended = 0
    for action in random_actions(env, 31):
        real, free = env.step(action), oracle.step(action)
        for group, value in real.final_obs.items():
            assert torch.equal(value[alive], free.final_obs[group][alive])
            goes_on = alive & ~real.done
            assert torch.equal(real.obs[group][goes_on], free.obs[group][goes_on])
        assert torch.equal(real.reward[alive], free.reward[alive])
        ended += int((alive & real.done).sum())
        alive &= ~real.done
    assert ended == NUM


@every_task
def test_observing_and_asking_for_the_end_change_nothing(name):
    env = make_env(name)
    env.reset()
    for action in random_actions(env, 25):
        env.step(action)
        before = copied(env)
        first, end = env._observe(), env.task.terminated().clone()
        assert differences(first, env._observe()) == []
        assert torch.equal(end, env.task.terminated())
        assert differences(before, copied(env)) == []


@every_task
def test_what_a_step_returned_stays_what_it_was(name):
    env = make_env(name, episode_length=5)
    env.reset()
    returned = []
    for action in random_actions(env, 8):
        step = env.step(action)
        returned += leaves([getattr(step, field) for field in step.__slots__])
    copies = [value.clone() for _, value in returned]
    for action in random_actions(env, 8, seed=1):
        env.step(action)
    assert [path for (path, value), copy in zip(returned, copies, strict=True) if not same(value, copy)] == []


@every_task
def test_what_a_task_keeps_is_tensors_written_in_place(name):
    env = make_env(name, episode_length=10)
    env.reset()
    tensors = {path: value.data_ptr() for path, value in env.task._own_tensors().items()}
    others = _other_values(env.task)
    for action in random_actions(env, 25):
        env.step(action)
    moved = {path: value.data_ptr() for path, value in env.task._own_tensors().items()}
    assert moved == tensors, "replaced instead of written in place"
    # A CUDA graph would freeze it, and a checkpoint forget it.
    assert _other_values(env.task) == others, "changes from step to step, but is no tensor of the task"


def _other_values(task: Task[Any]) -> dict[str, Any]:
    """Numbers and texts among what a task keeps, and tensors where a checkpoint does not look for them."""
    return {key: _value(value, task.random) for key, value in vars(task).items() if key not in ("cfg", "sim")}


def _value(value: Any, random: EnvRandom) -> Any:
    if isinstance(value, (list, tuple)):
        return [_value(item, random) for item in value]
    if isinstance(value, dict):
        return {key: _value(item, random) for key, item in value.items()}
    if value is random:
        return None  # a checkpoint has it
    if isinstance(value, TaskPart):
        return {key: _value(item, random) for key, item in vars(value).items()}
    if hasattr(value, "__dict__") and not type(value).__module__.startswith(("gpusim_rl.sim", "torch")):
        inside = vars(value).items()
        return {"object": {k: v.tolist() if isinstance(v, Tensor) else _value(v, random) for k, v in inside}}
    return value if isinstance(value, (int, float, str, bool, type(None))) else None


@every_task
def test_a_state_continues_bit_for_bit_in_another_environment(name):
    env, other = make_env(name, episode_length=25), make_env(name, episode_length=25, seed=9)
    env.reset()
    other.reset()
    actions = list(random_actions(env, 40))
    for action in actions[:15]:
        env.step(action)
    state = copied(env)
    later = [env.step(action) for action in actions[15:]]
    assert differences(other.load_state_dict(state), state["obs"]) == []
    for action, expected in zip(actions[15:], later, strict=True):
        step = other.step(action)
        for field in step.__slots__:
            assert differences(getattr(expected, field), getattr(step, field)) == [], field
    assert differences(copied(env), copied(other)) == []


@every_task
def test_actions_beyond_the_limit_are_the_limit(name):
    one, two = make_env(name), make_env(name)
    one.reset()
    two.reset()
    limit = one.cfg.clip_actions
    for action in random_actions(one, 5):
        far = one.step(10.0 * limit * action)
        near = two.step((10.0 * limit * action).clamp(-limit, limit))
        assert differences(far.obs, near.obs) == []


@every_task
def test_a_world_that_breaks_is_reset_and_no_other_world_notices(name):
    env, calm = make_env(name), make_env(name)
    env.reset()
    calm.reset()
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


@every_task
def test_its_worlds_can_differ(name):
    scene = make_env(name, num_envs=1).sim.scene
    factor = {"range": [0.8, 1.2], "operation": "scaling", "distribution": "uniform"}
    masses = {
        actor: {"rigid_body_properties": {"mass": factor}}
        for actor in scene.articulation_names
        if any(body.mass[0] > 0 for body in map(scene.model.body, range(scene.model.nbody)) if _of(actor, body.name))
    }
    noise = {"range": [0.0, 0.01], "operation": "additive", "distribution": "gaussian"}
    params = {"observations": noise, "actions": noise, "latency": {"range": [0, 1]}, "actor_params": masses}
    env = make_env(name, episode_length=4, randomize=True, randomization_params=params)
    obs = env.reset()
    assert torch.isfinite(joined(obs)).all() and not torch.equal(obs["policy"], env._task_obs()["policy"])
    for action in random_actions(env, 9):
        step = env.step(action)
        assert torch.isfinite(joined(step.obs)).all() and not step.diverged.any()
    for actor in masses:
        mass = env.sim.param("body_mass", actor).value
        assert (mass.amax(dim=0) > mass.amin(dim=0)).any(), actor


def _of(actor: str, body: str) -> bool:
    return body.startswith(f"{actor}/")


# The run


def quietly(syncs: SyncCounter, call: Callable[..., Any]) -> Callable[..., Any]:
    def paused(*args: Any, **kwargs: Any) -> Any:
        with syncs.pause():
            return call(*args, **kwargs)

    return paused


@every_task
def test_an_iteration_waits_for_nothing(name, tmp_path):
    """Counted over acting, the task, the update and the record; not counted are CPU physics and the interval's row."""
    trainer = make_trainer(name, tmp_path, log={"interval": 1000})
    run_dir = RunDir.create(tmp_path / "runs", name, name, config={}, overrides=[])
    with Logger(trainer, run_dir) as log:
        trainer.iterate(log)  # what is made once
        syncs = SyncCounter()
        for method in ("step", "reset", "refresh"):
            setattr(trainer.env.sim, method, quietly(syncs, getattr(trainer.env.sim, method)))
        with syncs:
            trainer.iterate(log)
    assert syncs.total == 0, syncs.locations


# MuJoCo Warp compiles kernels for every scene, up to a minute each: the everyday run proves it on some.
EVERY_DAY = ("Cartpole", "Ant", "Anymal", "Hopper")
SIMULATORS = [
    *((name, "mujoco") for name in TASKS),
    *(pytest.param(name, "mjwarp", marks=() if name in EVERY_DAY else pytest.mark.slow) for name in TASKS),
    *((name, "newton") for name in NEWTON if name in TASKS),
]


@pytest.mark.parametrize(("name", "sim"), SIMULATORS)
def test_it_trains_on_every_simulator(name, sim, tmp_path):
    if sim == "newton":
        pytest.importorskip("newton")
    trainer = make_trainer(
        name, tmp_path, num_envs=4, max_iterations=2, sim=sim, device="cpu", ppo={"minibatch_size": 16}
    )
    row = trainer.train()
    assert trainer.choice.name == sim and row["iteration"] == 2
    assert all(value.isfinite().all() for value in trainer.algorithm.policy.state_dict().values())
    assert row["sim/diverged"] == 0 and row["sim/overflow"] == 0


# The suite itself: what a task does wrong is found


class ConstantElement(Cartpole):
    def observe(self):
        return torch.cat([super().observe(), torch.ones(self.num_envs, 1)], dim=1)


class ImpureObservation(Cartpole):
    def observe(self):
        return super().observe() + 0.01 * self.random.uniform(-1.0, 1.0, 4)


class OneStart(Cartpole):
    def reset(self, where):
        self.robot.set_state(where, joint_pos=torch.full_like(self.robot.joint_pos, 0.05))


class Replaces(Cartpole):
    def apply_action(self, action):
        self.last = action.clone()
        super().apply_action(action)


class HiddenState(Cartpole):
    def __init__(self, cfg, sim):
        super().__init__(cfg, sim)
        self.history = SimpleNamespace(speed=torch.zeros(self.num_envs, 2))

    def apply_action(self, action):
        self.history.speed.add_(self.robot.joint_vel)
        super().apply_action(action)


class CountsInPython(Cartpole):
    steps = 0

    def apply_action(self, action):
        self.steps = self.steps + 1
        super().apply_action(action)


class CountsInAPart(Cartpole):
    class Part(TaskPart):
        steps = 0

    def __init__(self, cfg, sim):
        super().__init__(cfg, sim)
        self.part = self.Part()

    def advance(self, done):
        self.part.steps = self.part.steps + 1


class MixesEnvs(Cartpole):
    def observe(self):
        return super().observe() - 0.1 * self.robot.joint_vel.clamp(-9, 9).mean()


class OwnTimeLimit(Cartpole):
    """Ends episodes by a clock that a checkpoint forgets."""

    def __init__(self, cfg, sim):
        super().__init__(cfg, sim)
        self.clock = SimpleNamespace(steps=torch.zeros(self.num_envs))

    def reset(self, where):
        super().reset(where)
        self.clock.steps.masked_fill_(where, 0.0)

    def apply_action(self, action):
        self.clock.steps += 1
        super().apply_action(action)

    def terminated(self):
        return super().terminated() | (self.clock.steps > 3)


class PeeksAfterReset(Cartpole):
    """Looks at how the env before it fares: alone or with others, it sees something else."""

    def rewards(self):
        return {"speed": self.robot.joint_vel[:, 0].roll(1)}


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (ConstantElement, test_no_element_of_an_observation_is_constant),
        (ConstantElement, test_the_class_docstring_is_the_specification),
        (ImpureObservation, test_observing_and_asking_for_the_end_change_nothing),
        (OneStart, test_starts_are_random_in_every_world_and_episode),
        (Replaces, test_what_a_task_keeps_is_tensors_written_in_place),
        (HiddenState, test_what_a_task_keeps_is_tensors_written_in_place),
        (CountsInPython, test_what_a_task_keeps_is_tensors_written_in_place),
        (CountsInAPart, test_what_a_task_keeps_is_tensors_written_in_place),
        (OwnTimeLimit, test_a_state_continues_bit_for_bit_in_another_environment),
        (MixesEnvs, test_a_world_that_breaks_is_reset_and_no_other_world_notices),
        (PeeksAfterReset, test_final_obs_is_what_a_run_without_resets_sees),
    ],
)
def test_the_suite_finds(monkeypatch, broken, test):
    def make_broken(name: str, *, num_envs: int = NUM, seed: int = 0, **settings: Any) -> VecEnv:
        run = prepare(name, num_envs=num_envs, task=settings)[0]
        choice = SimChoice("mujoco", CPU, "test")
        return VecEnv.make(broken, run.task, num_envs=num_envs, choice=choice, sim=run.sim, seed=seed)

    monkeypatch.setitem(globals(), "make_env", make_broken)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test("Cartpole")
