"""Tests of `VecEnv` on real physics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mujoco
import pytest
import torch
from torch import Tensor

from gpusim_rl.env import Step, Task, TaskConfig, VecEnv
from gpusim_rl.errors import TaskError
from gpusim_rl.settings.simulators import SIMULATORS
from gpusim_rl.sim import Scene, Sim
from helpers.raised import raises
from helpers.states import copied, fields, saved
from helpers.task_envs import plain_env
from helpers.training import leaves

# A cart on a rail with a pole of 0.6 m, without contacts.
CART = """
<mujoco>
  <default><geom contype="0" conaffinity="0"/></default>
  <worldbody>
    <body name="cart" pos="0 0 1">
      <joint name="slide" type="slide" axis="1 0 0"/><geom type="box" size="0.1 0.05 0.05" mass="1"/>
      <body name="pole">
        <joint name="hinge" axis="0 1 0" damping="0.01"/>
        <geom type="capsule" fromto="0 0 0 0 0 0.6" size="0.03" mass="0.2"/>
        <body name="tip" pos="0 0 0.6"><geom type="sphere" size="0.04" mass="0.1"/></body>
      </body>
    </body>
  </worldbody>
  <actuator><motor name="force" joint="slide" gear="20"/></actuator>
</mujoco>
"""

# A free box with a fin: it falls, bounces and rests, so contacts and warm starts matter.
BOX = """
<mujoco>
  <worldbody>
    <body name="box" pos="0 0 0.4">
      <freejoint/><geom type="box" size="0.1 0.15 0.05" mass="1"/>
      <body name="fin" pos="0.1 0 0">
        <joint name="fin" axis="0 1 0" range="-60 60" limited="true" damping="0.1"/>
        <geom type="capsule" fromto="0 0 0 0.2 0 0" size="0.03" mass="0.1"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor name="fin" joint="fin" gear="2"/></actuator>
</mujoco>
"""

START = 0.1  # m, rad
LENGTH = 0.6  # m


class Cart(Task["Cart.Config"]):
    """Cart that starts within +-START and terminates beyond `limit` on the rail."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(TaskConfig):
        limit: float = 0.5

    cfg: Config

    @classmethod
    def scene(cls, cfg: Config) -> Scene:
        scene = Scene(cfg.physics_hz)
        scene.add("cart", mujoco.MjSpec.from_string(CART))
        return scene

    def __init__(self, cfg: Config, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("cart")
        self.tip = self.robot.bodies(["tip"])
        self.num_actions = 1

    def reset(self, where: Tensor) -> None:
        pos, vel = self.random.uniform(-START, START, 2), self.random.uniform(-0.5, 0.5, 2)
        self.robot.set_state(where, joint_pos=pos, joint_vel=vel)

    def apply_action(self, action: Tensor) -> None:
        self.robot.actuate(action)

    def observe(self) -> Tensor | dict[str, Tensor]:
        robot = self.robot
        return torch.cat([robot.joint_pos, robot.joint_vel, self.tip.pos[:, 0], self.actions], 1)

    def rewards(self) -> dict[str, Tensor]:
        x = self.robot.joint_pos[:, 0]
        return {"alive": torch.ones_like(x), "position": 0.5 * x}

    def terminated(self) -> Tensor:
        return self.robot.joint_pos[:, 0].abs() > self.cfg.limit


class Box(Task["TaskConfig"]):
    Config = TaskConfig

    @classmethod
    def scene(cls, cfg: TaskConfig) -> Scene:
        scene = Scene(cfg.physics_hz)
        scene.add_ground()
        scene.add("box", mujoco.MjSpec.from_string(BOX))
        scene.add_contact_sensor("box", ["box"])
        return scene

    def __init__(self, cfg: TaskConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("box")
        self.contact = self.robot.contacts(["box"])
        self.num_actions = 1
        self.travelled = torch.zeros(sim.num_envs, device=sim.device)  # kept between steps

    def reset(self, where: Tensor) -> None:
        noise = self.random.uniform(-0.1, 0.1, 3)
        velocities = {"root_lin_vel": self.random.normal(0.0, 0.5, 3), "root_ang_vel": self.random.normal(0.0, 1.0, 3)}
        self.robot.set_state(where, root_pos=self.robot.root_pos + noise, **velocities)
        self.travelled.masked_fill_(where, 0.0)

    def apply_action(self, action: Tensor) -> None:
        self.robot.actuate(action)

    def observe(self) -> Tensor | dict[str, Tensor]:
        r = self.robot
        state = torch.cat([r.root_pos, r.root_quat, r.root_lin_vel, r.root_ang_vel, r.joint_pos], 1)
        return {"policy": state, "critic": self.contact.force[:, 0]}

    def rewards(self) -> dict[str, Tensor]:
        self.travelled += self.robot.root_lin_vel.norm(dim=1) * self.dt
        return {"travelled": self.travelled.clone()}

    def terminated(self) -> Tensor:
        return self.robot.root_pos[:, 2] < -1.0


def make(task: type[Task] = Cart, num_envs: int = 6, seed: int = 0, **settings: Any) -> VecEnv:
    return plain_env(task, num_envs, seed, **settings)


def actions(steps: int, num_envs: int = 6, seed: int = 0, scale: float = 1.5) -> Tensor:
    """Return actions that are biased differently in each env, so that episodes end at different times."""
    g = torch.Generator().manual_seed(seed)
    bias = torch.linspace(-1.0, 1.0, num_envs)[None, :, None]
    return scale * (bias + 0.5 * torch.randn(steps, num_envs, 1, generator=g))


def run(env: VecEnv, pushes: Tensor) -> list[Step]:
    """Return copies of the steps that these actions lead to."""
    env.reset()
    return [copied(env.step(push)) for push in pushes]


def same(a: Step, b: Step, which: Tensor | slice = slice(None)) -> bool:
    """Return whether two steps are equal bit for bit in these envs."""
    ours, theirs = ([tensor[which] for _, tensor in leaves(fields(step)) if tensor is not None] for step in (a, b))
    return all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


# Episodes


def test_done_envs_reset_in_the_same_step() -> None:
    env = make()
    steps = run(env, actions(60))
    done = torch.stack([s.done for s in steps])
    assert done.any(dim=0).all(), "every env must end once"
    assert not done.all(dim=1).any(), "envs must not all end at once"
    for step in steps:
        obs, final = step.obs["policy"], step.final_obs["policy"]
        # done envs return the first observation of the next episode, with zero action
        assert (obs[step.done][:, :2].abs() <= START).all()
        assert (obs[step.done][:, -1] == 0.0).all()
        ended = final[step.terminated]
        assert (ended[:, 0].abs() > 0.5).all(), "final_obs must be the last observation of its episode"
        # other envs have equal observations
        assert torch.equal(obs[~step.done], final[~step.done])
        # body poses match the state in both, also right after a reset
        for x in (obs, final):
            tip_x = x[:, 0] + LENGTH * torch.sin(x[:, 1])
            tip_z = 1.0 + LENGTH * torch.cos(x[:, 1])
            torch.testing.assert_close(x[:, 4], tip_x, rtol=0, atol=1e-5)
            torch.testing.assert_close(x[:, 6], tip_z, rtol=0, atol=1e-5)


def test_time_limit_truncates() -> None:
    env = make(limit=1e9, episode_length=7)
    for t, step in enumerate(run(env, actions(21)), start=1):
        assert not step.terminated.any() and not step.diverged.any() and not step.incomplete.any()
        assert step.truncated.tolist() == [t % 7 == 0] * 6
        assert torch.equal(step.done, step.truncated)


def test_failure_at_the_time_limit_is_a_termination() -> None:
    class Falls(Cart):
        def terminated(self) -> Tensor:
            return torch.ones(self.num_envs, dtype=torch.bool)

    (step,) = run(make(Falls, episode_length=1), actions(1))
    assert step.terminated.all() and step.done.all() and not step.truncated.any()


def test_staggered_starts_spread_over_the_time_limit() -> None:
    env = make(num_envs=400, limit=1e9, randomize_episode_start=True, episode_length=20)
    env.reset()
    assert env.progress.min() == 0 and env.progress.max() == 19
    counts = torch.bincount(env.progress, minlength=20).float()
    assert (counts > 4).all() and (counts < 45).all(), "not evenly spread over the time limit"
    assert env.staggered.all()
    left = 20 - env.progress
    for t in range(1, 41):
        step = env.step(torch.zeros(400, 1))
        assert torch.equal(step.truncated, (left == t) | (left == t - 20))
        # only an env's first episode can be incomplete
        assert torch.equal(step.incomplete, left == t)
        assert torch.equal(env.staggered, left > t)


def test_failed_staggered_episode_is_not_incomplete() -> None:
    # the policy failed before the time limit, so the return is valid
    env = make(limit=0.2, randomize_episode_start=True, episode_length=1000)
    steps = run(env, actions(60, scale=5.0))
    assert any(s.terminated.any() for s in steps)
    assert not any((s.incomplete & s.terminated).any() for s in steps)


def test_task_hooks_are_called_in_order() -> None:
    calls: list[str] = []

    class Recorded(Cart):
        def __getattribute__(self, name: str) -> Any:
            if name in ("apply_action", "rewards", "terminated", "observe", "reset"):
                calls.append(name)
            return super().__getattribute__(name)

    env = make(Recorded)
    env.reset()
    sim_step, decimation = env.sim.step, []

    def stepping(substeps: int) -> None:
        calls.append("physics")
        decimation.append(substeps)
        sim_step(substeps)

    env.sim.step = stepping  # type: ignore[method-assign]
    calls.clear()
    env.step(torch.zeros(6, 1))
    assert calls == ["apply_action", "physics", "rewards", "terminated", "observe", "reset", "observe"]
    assert decimation == [4] and env.task.dt == pytest.approx(0.02)


def test_body_poses_follow_state_set_in_advance() -> None:
    class Lifted(Box):
        def __init__(self, cfg: Any, sim: Sim) -> None:
            super().__init__(cfg, sim)
            self.body = self.robot.bodies(["box"])

        def observe(self) -> Tensor:
            return torch.cat([self.robot.root_pos, self.body.pos[:, 0]], dim=1)

        def advance(self, done: Tensor) -> None:
            up = torch.tensor([0.0, 0.0, 5.0])
            self.robot.set_state(torch.ones_like(done), root_pos=self.robot.root_pos + up)

    env = make(Lifted)
    env.reset()
    step = env.step(torch.zeros(6, 1))
    root, body = step.final_obs["policy"][:, 2], step.final_obs["policy"][:, 5]
    torch.testing.assert_close(root, body + 5.0)
    torch.testing.assert_close(step.obs["policy"][:, 2], step.obs["policy"][:, 5])


def test_reset_hooks_start_from_the_default_state() -> None:
    # Box.reset adds noise to the current pose, which must be the scene's default each time
    default = torch.tensor([0.0, 0.0, 0.4])
    env = make(Box, num_envs=200, episode_length=3)
    for _ in range(2):
        pos = env.reset()["policy"][:, :3]
        assert ((pos - default).abs() <= 0.1 + 1e-6).all()
        assert (env.task.travelled == 0).all()
    for _ in range(7):
        step = env.step(torch.zeros(200, 1))
        pos = step.obs["policy"][step.done][:, :3]
        assert ((pos - default).abs() <= 0.1 + 1e-6).all()


def test_returned_step_is_never_overwritten() -> None:
    class Views(Cart):  # hooks return views of the simulator's memory
        def observe(self) -> Tensor:
            return self.robot.joint_pos

        def rewards(self) -> dict[str, Tensor]:
            return {"position": self.robot.joint_pos[:, 0]}

    env = make(Views)
    first = env.reset()
    kept = [(first["policy"], first["policy"].clone())]
    for push in actions(40):
        step = env.step(push)
        given = (step.obs["policy"], step.final_obs["policy"], step.reward, step.done)
        kept += [(x, x.clone()) for x in given]
    assert all(torch.equal(x, copy) for x, copy in kept)


# Clipping


def test_actions_are_clipped_without_changing_the_input() -> None:
    seen: list[Tensor] = []

    class Recorded(Cart):
        def apply_action(self, action: Tensor) -> None:
            seen.append(action.clone())
            super().apply_action(action)

    env = make(Recorded, clip_actions=0.5)
    env.reset()
    push = torch.tensor([[-9.0], [-0.5], [-0.2], [0.0], [0.3], [7.0]])
    before = push.clone()
    obs = env.step(push).obs["policy"]
    expected = [-0.5, -0.5, -0.2, 0.0, 0.3, 0.5]
    assert seen[0].flatten().tolist() == pytest.approx(expected)
    assert obs[:, -1].tolist() == pytest.approx(expected), "the task must see the clipped action"
    assert torch.equal(push, before), "the caller's tensor changed"


# Divergence


def inject(env: VecEnv, env_id: int, value: float = math.nan) -> None:
    where = torch.arange(env.num_envs) == env_id
    bad = torch.full_like(env.task.robot.joint_vel, value)
    env.task.robot.set_state(where, joint_vel=bad)
    env.sim.refresh()


@pytest.mark.parametrize(("task", "value"), [(Cart, math.nan), (Box, math.inf), (Box, 1e9)])
def test_diverged_env_is_masked_and_reset(task: type[Task], value: float) -> None:
    pushes = actions(20)
    bad, clean = make(task), make(task)
    bad.reset()
    clean.reset()
    others = torch.arange(6) != 2
    for t, push in enumerate(pushes):
        if t == 5:
            inject(bad, 2, value)
        ours, theirs = copied(bad.step(push)), copied(clean.step(push))
        assert same(ours, theirs, others), "other envs changed"
        assert all(torch.isfinite(v).all() for v in (*ours.obs.values(), *ours.final_obs.values()))
        assert torch.isfinite(ours.reward).all()
        if t != 5:
            assert not ours.diverged.any()
            continue
        assert ours.diverged.tolist() == [w == 2 for w in range(6)] and not ours.bad_action.any()
        assert ours.done[2] and not ours.terminated[2] and not ours.truncated[2]
        assert ours.incomplete[2] and ours.reward[2] == 0.0
        assert all(term[2] == 0.0 for term in ours.terms.values())
        assert all((v[2] == 0.0).all() for v in ours.final_obs.values())
        assert bad.progress[2] == 0
        first_obs = ours.obs["policy"][2]
        if task is Cart:
            assert (first_obs[:2].abs() <= START).all()
        else:
            assert ((first_obs[:3] - torch.tensor([0.0, 0.0, 0.4])).abs() <= 0.1 + 1e-6).all()
    dump = bad.nan_guard.read()
    assert dump is not None and dump["cause"] == "physics"


def make_on(sim: str, task: type[Task] = Cart, **changes: Any) -> VecEnv:
    if SIMULATORS[sim].extra:
        pytest.importorskip(SIMULATORS[sim].library)
    return make(task, sim=sim, **changes)


@pytest.mark.parametrize(
    ("sim", "value"), [("mujoco", math.nan), ("mujoco", -math.inf), ("mjwarp", math.inf), ("newton", math.nan)]
)
def test_non_finite_action_marks_its_env_as_diverged(sim: str, value: float) -> None:
    bad, clean = make_on(sim), make_on(sim)
    bad.reset()
    clean.reset()
    others = torch.arange(6) != 3
    for t, push in enumerate(actions(10)):
        poisoned = push.clone()
        if t == 4:
            poisoned[3] = value
        ours, theirs = copied(bad.step(poisoned)), copied(clean.step(push))
        assert same(ours, theirs, others), "other envs changed"
        assert torch.isfinite(ours.obs["policy"]).all()
        expected = [t == 4 and env == 3 for env in range(6)]
        assert ours.bad_action.tolist() == ours.diverged.tolist() == expected
        assert torch.isfinite(bad.task.actions).all(), "a task may convert actions to integers"
        if t == 4:
            assert ours.done[3] and ours.reward[3] == 0.0 and bad.progress[3] == 0
    dump = bad.nan_guard.read()
    assert dump is not None and dump["cause"] == "action" and dump["env"] == 3 and dump["diverged_envs"] == 1
    assert torch.equal(dump["action"], torch.tensor([value]).expand(1)) or math.isnan(value)


class BadControl(Cart):
    """Cart with non-finite controls, or forces on its tip, in the fourth step of env 3."""

    force = False
    value = math.nan

    def __init__(self, cfg: Any, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.steps = torch.zeros((), dtype=torch.int64)

    def apply_action(self, action: Tensor) -> None:
        self.steps += 1
        where = (torch.arange(6) == 3)[:, None] & (self.steps == 4)
        self.robot.actuate(action if self.force else torch.where(where, self.value, action))
        if self.force:
            self.tip.apply_wrench(torch.where(where, self.value, 0.0)[:, None].expand(-1, 1, 3))


class BadForce(BadControl):
    force = True


@pytest.mark.parametrize(
    ("sim", "task"), [("mujoco", BadControl), ("mujoco", BadForce), ("mjwarp", BadForce), ("newton", BadControl)]
)
def test_non_finite_control_marks_its_env_as_diverged(
    sim: str, task: type[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env = make_on(sim, task)
    env.reset()
    for t, push in enumerate(actions(10)):
        step = env.step(push)
        expected = [t == 3 and env_id == 3 for env_id in range(6)]
        assert step.bad_action.tolist() == step.diverged.tolist() == expected
        assert all(torch.isfinite(value).all() for value in (step.obs["policy"], step.final_obs["policy"], step.reward))
    dump = env.nan_guard.read()
    assert dump is not None and dump["cause"] == "apply_action" and dump["env"] == 3
    assert dump["action"].isfinite().all()
    assert list(tmp_path.iterdir()) == [], "MuJoCo wrote a log file"


def test_check_reports_non_finite_actions_and_controls() -> None:
    env = make(check=True)
    env.reset()
    push = torch.zeros(6, 1)
    env.step(push)
    push[4] = math.inf
    with pytest.raises(TaskError, match=r"Cart\.step\(\): .* \(env 4, column 0\)$"):
        env.step(push)
    env = make(BadControl, check=True)
    env.reset()
    for _ in range(3):
        env.step(torch.zeros(6, 1))
    with pytest.raises(TaskError, match=r"^BadControl\.apply_action\(\): .* \(env 3\)$"):
        env.step(torch.zeros(6, 1))


@pytest.mark.parametrize("limit", [5.0, None])
def test_clipping_keeps_infinite_observations_visible(limit: float | None) -> None:
    class Infinite(Cart):
        infinite = False

        def observe(self) -> Tensor:
            x = self.robot.joint_pos
            return torch.where((torch.arange(6) == 3)[:, None] & self.infinite, math.inf, x)

    env = make(Infinite, clip_observations=limit)
    env.reset()
    env.task.infinite = True
    step = env.step(torch.zeros(6, 1))
    for obs in (step.obs["policy"], step.final_obs["policy"]):
        assert obs.isfinite().all(dim=1).tolist() == [env_id != 3 for env_id in range(6)]


def test_clipping_keeps_finite_values_bit_for_bit() -> None:
    values = torch.tensor([-0.0, 0.0, -1e-40, 1e-40, -3e38, 3e38, 0.25, -0.25, 7.0, -7.0])

    class Fixed(Cart):
        def observe(self) -> Tensor:
            return values.expand(6, -1)

    obs = make(Fixed, clip_observations=5.0).reset()["policy"]
    expected = values.clamp(-5.0, 5.0).expand(6, -1)
    assert torch.equal(obs.view(torch.int32), expected.contiguous().view(torch.int32))


# State


def test_state_dict_holds_every_tensor_of_the_task() -> None:
    class Keeps(Cart):
        def __init__(self, cfg: Any, sim: Sim) -> None:
            super().__init__(cfg, sim)
            self.level = torch.zeros(sim.num_envs)
            self.gains = {"p": torch.zeros(2), "d": [torch.zeros(()), torch.zeros(3)]}
            self.name = "cart"
            # an expanded tensor cannot be written in place, so it is not saved
            self.height = torch.ones(1).expand(sim.num_envs)

    def kept(env: VecEnv) -> list[Tensor]:
        task: Any = env.task
        return [task.level, task.gains["p"], *task.gains["d"]]

    one, other = make(Keeps), make(Keeps)
    for env in (one, other):
        env.reset()
    for i, tensor in enumerate(kept(one)):
        tensor.fill_(1.0 + i)
    addresses = [t.data_ptr() for t in kept(other)]
    other.load_state_dict(saved(one.state_dict()))
    assert [t.data_ptr() for t in kept(other)] == addresses, "a captured graph needs the same addresses"
    assert all(torch.equal(a, b) for a, b in zip(kept(one), kept(other), strict=True))


def test_load_keeps_constants_of_the_new_configuration() -> None:
    class Commanded(Cart):
        def __init__(self, cfg: Any, sim: Sim) -> None:
            super().__init__(cfg, sim)
            self.limit = torch.full((2,), cfg.clip_actions)
            self.moved = torch.zeros(sim.num_envs)
            self.back = torch.zeros(())

        def advance(self, done: Tensor) -> None:
            self.moved += 1.0
            self.back.copy_(1.0 - self.back)  # also in the check of `reset`

    old, new = make(Commanded), make(Commanded, clip_actions=0.5)
    run(old, actions(3))
    run(new, actions(2))
    tasks: list[Any] = [old.task, new.task]
    assert tasks[0].back == 0.0 and tasks[1].back == 1.0
    new.load_state_dict(old.state_dict())
    assert torch.equal(tasks[1].limit, torch.full((2,), 0.5)), "the saved constant replaced the new one"
    assert torch.equal(tasks[1].moved, tasks[0].moved) and tasks[1].moved[0] == 4.0
    assert tasks[1].back == 0.0, "a tensor equal to its initial value was not restored"


def test_state_dict_is_a_snapshot() -> None:
    env = make(Box)
    run(env, actions(5))
    state = env.state_dict()

    def flat(node: Any) -> list[Tensor]:
        if isinstance(node, dict):
            return [t for v in node.values() for t in flat(v)]
        return [node] if isinstance(node, Tensor) else []

    before = [t.clone() for t in flat(state)]
    assert len(before) > 8
    env.step(torch.ones(6, 1))
    assert all(torch.equal(a, b) for a, b in zip(before, flat(state), strict=True))


@pytest.mark.parametrize("num_envs", [4, 6])
def test_begin_from_copies_training_progress(num_envs: int) -> None:
    class School(Cart):
        def __init__(self, cfg: Any, sim: Sim) -> None:
            super().__init__(cfg, sim)
            self.steps = torch.zeros((), dtype=torch.int64)
            self.level = torch.zeros(sim.num_envs, 2)
            self.costs = torch.zeros(3, sim.num_envs)
            self.limit = torch.full((2,), cfg.clip_actions)

        def advance(self, done: Tensor) -> None:
            self.steps += 1
            self.level += torch.arange(self.num_envs)[:, None]
            self.costs += 1.0

    old, new = make(School), make(School, num_envs, clip_actions=0.5, randomize_episode_start=True)
    run(old, actions(7))
    new.reset()
    before: Any = new.task
    random = before.random.state_dict()
    obs = new.begin_from(old.state_dict())
    task: Any = new.task
    assert task.steps == 8  # seven steps and the check of `reset`
    assert torch.equal(task.level, 8.0 * (torch.arange(num_envs) % 6)[:, None].expand(-1, 2))
    assert task.costs.eq(8.0 if num_envs == 6 else 0.0).all(), "the first dimension must be num_envs"
    assert torch.equal(task.limit, torch.full((2,), 0.5))
    assert new.staggered.all() and task.progress.unique().numel() > 1, "episodes must start as in a new run"
    assert not torch.equal(task.random.state_dict()["key"], random["key"]), "the random stream must be new"
    assert torch.equal(obs["policy"], new._observe()["policy"])
    after = new.step(torch.zeros(num_envs, 1))
    assert after.obs["policy"].isfinite().all() and task.steps == 9


# Errors of tasks: one line with task, hook, expected and actual value


def ones(task: Any) -> Tensor:
    return torch.ones(task.num_envs)


# Hook, its invalid result, and words of the error.
BROKEN: list[tuple[str, Callable[[Any], Any], list[str]]] = [
    ("observe()", lambda task: task.robot.joint_pos[:-1], ["[5, 2]", "[6, "]),
    ("observe()", lambda task: task.robot.joint_pos.double(), ["torch.float64", "torch.float32"]),
    (
        "observe()",
        lambda _: torch.tensor([[0.0, math.nan if i == 4 else 0.0] for i in range(6)]),
        ["env 4", "column 1"],
    ),
    ("observe()", lambda task: {"actor": task.robot.joint_pos}, ["'actor'", "'policy'"]),
    ("observe()", lambda task: None, ["NoneType", "tensor"]),
    ("observe()", lambda task: {"policy": task.robot.joint_pos.numpy()}, ["ndarray", "tensor"]),
    ("observe()['critic']", lambda task: {"policy": task.robot.joint_pos, "critic": torch.ones(2, 2)}, ["[2, 2]"]),
    ("observe()", lambda task: task.robot.joint_pos.to("meta"), ["meta", "cpu"]),
    ("rewards()", ones, ["Tensor", "dict"]),
    ("rewards()", lambda task: {}, ["{}", "dict"]),
    ("rewards()['progress']", lambda task: {"progress": task.robot.joint_pos[:, :1]}, ["[6, 1]", "[6]"]),
    ("rewards()['alive']", lambda task: {"alive": 1.0}, ["float", "[6]"]),
    ("rewards()", lambda task: {"ok": ones(task), "bad": ones(task) * math.nan}, ["'bad'", "not finite", "env 0"]),
    ("terminated()", ones, ["torch.float32", "torch.bool"]),
]


@pytest.mark.parametrize(("hook", "result", "words"), BROKEN)
def test_invalid_hook_result_is_reported_in_one_line(hook: str, result: Callable[[Any], Any], words: list[str]) -> None:
    broken = type("Broken", (Cart,), {hook.partition("(")[0]: result})
    with pytest.raises(TaskError) as error:
        make(broken).reset()
    message = str(error.value)
    assert all(word in message for word in words), message
    assert error.value.key.startswith(f"Broken.{hook}") and "\n" not in message and len(message) < 200


@pytest.mark.parametrize("number", [None, 0])
def test_missing_num_actions_is_rejected(number: int | None) -> None:
    class Broken(Cart):
        def __init__(self, cfg: Any, sim: Sim) -> None:
            super().__init__(cfg, sim)
            self.num_actions = number  # type: ignore[assignment]

    with raises(TaskError, key="Broken.num_actions", got=number):
        make(Broken)


def test_observation_of_changing_size_is_rejected() -> None:
    class Grows(Cart):
        def observe(self) -> Tensor:
            size = 2 if (self.robot.joint_pos.abs() < 0.15).all() else 1
            return self.robot.joint_pos[:, :size]

    with raises(TaskError, key="Grows.observe()", got=[6, 1], expected="shape [6, 2]"):
        run(make(Grows), actions(30))


@pytest.mark.parametrize("hook", ["observe", "rewards"])
def test_check_reports_a_nan_in_the_step_that_made_it(hook: str) -> None:
    class Later(Cart):
        def __init__(self, cfg: Any, sim: Sim) -> None:
            super().__init__(cfg, sim)
            self.steps = 0

        def apply_action(self, action: Tensor) -> None:
            self.steps += 1

        def spoil(self, x: Tensor) -> Tensor:
            return torch.where(torch.arange(6) == 3, math.nan, x) if self.steps == 4 else x

        def observe(self) -> Tensor:
            x = self.robot.joint_pos
            return torch.stack([self.spoil(x[:, 0]) if hook == "observe" else x[:, 0], x[:, 1]], 1)

        def rewards(self) -> dict[str, Tensor]:
            x = self.robot.joint_pos[:, 0]
            return {"x": self.spoil(x) if hook == "rewards" else x}

    env = make(Later, check=True)
    env.reset()
    for _ in range(3):
        env.step(torch.zeros(6, 1))
    with pytest.raises(TaskError, match=rf"Later\.{hook}\(\).*env 3"):
        env.step(torch.zeros(6, 1))
    run(make(Later), actions(6))  # without `check` there is no error


def test_actions_of_wrong_shape_are_rejected() -> None:
    env = make()
    env.reset()
    for shape in ((6, 2), (5, 1)):
        with pytest.raises(ValueError, match=r"shape \[6, 1\], got"):
            env.step(torch.zeros(shape))
