"""Tests of cameras: images against geometry, on every simulator, with any number of threads."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import mujoco
import mujoco_warp
import pytest
import torch
from gpusim_rl.tasks.cartpole import Cartpole, CartpoleConfig
from torch import Tensor

from gpusim_rl.api import prepare
from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError, TaskError, one_line_if_out_of_memory
from gpusim_rl.files import provenance
from gpusim_rl.sim import Scene, Sim, SimChoice, camera_renderer, params
from gpusim_rl.sim.camera import FAR, SKY
from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.raised import raises
from helpers.scenes import ANT, ant_scene, everywhere, make, only, randomize_ants, scene_with

SIMS = [("mujoco", 3), ("mjwarp", 1)]
ALL = ("rgb", "depth", "segmentation")

MARBLE = """
<mujoco>
  <worldbody>
    <light name="lamp" type="point" pos="1 -2 3" diffuse="0.5 0.5 0.5"/>
    <body name="marble" pos="0 0 1">
      <freejoint/>
      <geom type="sphere" size="0.25" rgba="0.9 0.3 0.05 1"/>
      <geom type="box" pos="0 0 3" size="0.1 0.1 0.1" group="3"/>
      <camera name="own" pos="0 -2 0" xyaxes="1 0 0 0 0 1" fovy="40"/>
    </body>
  </worldbody>
</mujoco>
"""


def marble_scene() -> Scene:
    return scene_with(100, ground=True, marble=MARBLE)


def drawn(sim: Sim, where: Tensor | None = None) -> None:
    sim.reset(everywhere(sim) if where is None else where)
    sim.refresh()
    sim.draw()


def rays(height: int, width: int, fovy: float) -> Tensor:
    """Return each pixel's offset to the right and up [m] at one metre along the view, shape [height, width, 2]."""
    half = math.tan(math.radians(fovy / 2))
    up = half * (1 - 2 * (torch.arange(height) + 0.5) / height)
    right = half * width / height * (2 * (torch.arange(width) + 0.5) / width - 1)
    return torch.stack(torch.broadcast_tensors(right, up[:, None]), dim=-1)


@pytest.fixture(params=SIMS, ids=lambda param: f"{param[0]}-{param[1]}-threads")
def make_sim(request: pytest.FixtureRequest) -> Callable[..., Sim]:
    name, threads = request.param
    return lambda scene, num_envs=3, **changes: make(name, scene, num_envs, num_threads=threads, **changes)


# Images


def test_sphere_silhouette_is_the_analytic_disc(make_sim):
    scene, distance, fovy, size = marble_scene(), 2.0, 50.0, 96
    scene.add_camera("eye", pos=(0, -distance, 1), target=(0, 0, 1), fovy=fovy, size=(size, size), outputs=ALL)
    sim = make_sim(scene)
    eye = sim.camera("eye")
    drawn(sim)
    radius = math.tan(math.asin(0.25 / distance)) / math.tan(math.radians(fovy / 2)) * size / 2  # pixels
    from_middle = (torch.arange(size) + 0.5 - size / 2).square()
    from_middle = (from_middle[:, None] + from_middle).sqrt()
    ball = sim.scene.model.body("marble/marble").id
    seen = eye.segmentation == ball
    assert seen[:, from_middle < radius - 1].all() and not seen[:, from_middle > radius + 1].any()
    assert eye.segmentation.unique().tolist() == [-1, 0, ball]  # sky, ground and ball
    # depth of the nearest point, up to half a pixel
    assert torch.allclose(eye.depth[:, 47:49, 47:49], torch.tensor(distance - 0.25), atol=1e-3)
    red, green, blue = eye.rgb[:, size // 2, size // 2].float().unbind(dim=-1)
    assert (red > green).all() and (green > blue).all()
    sky = torch.tensor([int(255 * channel) for channel in SKY], dtype=torch.uint8)
    assert (eye.rgb[eye.segmentation == -1] == sky).all() and (eye.depth[eye.segmentation == -1] == FAR).all()


def test_plane_depth_is_analytic(make_sim):
    scene, height, fovy = marble_scene(), 3.0, 60.0
    half = math.radians(30.0) / 2
    quat = (math.cos(half), math.sin(half), 0.0, 0.0)  # from straight down towards +y
    scene.add_camera("down", pos=(5, 5, height), quat=quat, fovy=fovy, size=(40, 56), outputs=("depth",))
    sim = make_sim(scene)
    down = sim.camera("down")
    drawn(sim)
    assert down.depth.shape == (3, 40, 56) and down.depth.dtype == torch.float32
    # A pixel's ray descends by cos(pitch) - up sin(pitch) per metre along the view.
    up = rays(40, 56, fovy)[..., 1]
    expected = height / (math.cos(2 * half) - up * math.sin(2 * half))
    torch.testing.assert_close(down.depth, expected.expand(3, -1, -1), rtol=1e-4, atol=1e-4)


def test_first_row_is_top_and_first_column_left(make_sim):
    scene = marble_scene()
    for name, target in (("right", (1, 0, 1)), ("below", (0, 0, 0.3))):  # the ball is then on the left, or above
        scene.add_camera(name, pos=(0, -3, 1), target=target, size=(32, 32), outputs=("segmentation",))
    sim = make_sim(scene)
    images = {name: sim.camera(name) for name in ("right", "below")}
    drawn(sim)
    row, column = (images[name].segmentation[0].eq(1).nonzero().float().mean(0) for name in ("below", "right"))
    assert row[0] < 10 and abs(row[1] - 15.5) < 1 and column[1] < 12 and abs(column[0] - 15.5) < 1


def test_cameras_of_bodies_and_files_follow_their_body(make_sim):
    scene = marble_scene()
    scene.add_camera("marble/own", size=(48, 48), outputs=ALL)
    scene.add_camera("mine", "marble/marble", (0, -2, 0), target=(0, 0, 0), fovy=40, size=(48, 48), outputs=ALL)
    sim = make_sim(scene)
    own, mine = sim.camera("marble/own"), sim.camera("mine")
    ball = sim.articulation("marble")
    pos = torch.tensor([[0.0, 0.0, 1.0], [3.0, 2.0, 2.0], [-1.0, 0.5, 5.0]])
    ball.set_state(everywhere(sim), root_pos=pos)
    sim.refresh()
    sim.draw()
    for images in (own, mine):
        assert (images.segmentation[:, 24, 24] == 1).all()
        torch.testing.assert_close(images.depth[:, 24, 24], torch.full((3,), 1.75), rtol=0, atol=2e-3)
    assert len({images.rgb[env].sum().item() for env in range(3) for images in (mine,)}) == 3  # the ground moves
    close = (own.rgb.float() - mine.rgb.float()).abs().mean()
    assert close < 1.0  # both cameras are at the same place


def test_camera_shows_its_geom_groups(make_sim):
    scene = marble_scene()
    for name, groups in (("all", (0, 3)), ("hidden", (3,))):
        scene.add_camera(name, pos=(0, -4, 2.5), target=(0, 0, 2.5), size=(40, 40), outputs=ALL, fovy=60, groups=groups)
    sim = make_sim(scene)
    images = {name: sim.camera(name) for name in ("all", "hidden")}
    drawn(sim)
    count = {name: (image.segmentation == 1).sum(dim=(1, 2)) for name, image in images.items()}
    assert (count["hidden"] > 0).all() and (count["all"] > 2 * count["hidden"]).all()
    assert not (images["hidden"].segmentation == 0).any()  # the ground is of group 0


def test_scene_skybox_replaces_the_default_sky():
    scene = marble_scene()
    sky, gradient = mujoco.mjtTexture.mjTEXTURE_SKYBOX, mujoco.mjtBuiltin.mjBUILTIN_GRADIENT
    scene.spec.add_texture(
        name="sky", type=sky, builtin=gradient, rgb1=[0.8, 0.1, 0.1], rgb2=[0.2, 0.1, 0.1], width=64, height=384
    )
    scene.add_camera("up", pos=(0, -3, 1), target=(0, 0, 9), size=(16, 16))
    sim = make("mujoco", scene, 1)
    up = sim.camera("up")
    drawn(sim)
    assert (up.rgb[..., 0] > 2.0 * up.rgb[..., 2]).all() and up.rgb[0, 0, 0, 0] > up.rgb[0, -1, 0, 0]


def test_samples_average_a_larger_image(make_sim):
    scene = marble_scene()
    place = {"pos": (0, -3, 1), "target": (0, 0, 0.8)}
    for name, size, samples in (("coarse", 24, 1), ("smooth", 24, 3), ("large", 72, 1)):
        scene.add_camera(name, size=(size, size), samples=samples, **place)
    sim = make_sim(scene)
    rgb = {name: sim.camera(name).rgb for name in ("coarse", "smooth", "large")}
    drawn(sim)
    mean = rgb["large"].float().unflatten(2, (24, 3)).unflatten(1, (24, 3)).mean(dim=(2, 4))
    assert (rgb["smooth"].float() - mean).abs().max() <= 1.0 < (rgb["coarse"].float() - mean).abs().max()


# Agreement of simulators, batches and threads


def pictures(sim: Sim, seed: int = 0) -> dict[str, Tensor]:
    """Return images of Ants in random poses."""
    ant = sim.articulation("ant")
    eye = sim.camera("eye")
    randomize_ants([ant], seed)
    sim.refresh()
    sim.draw()
    return {name: getattr(eye, name).clone() for name in ALL} | {"qpos": sim.qpos.clone()}


def ant_with_eye() -> Scene:
    scene = ant_scene()
    scene.add_camera("eye", pos=(0, -4, 2), target=(0, 0, 0.5), size=(40, 56), outputs=ALL)
    return scene


@pytest.mark.parametrize("name", ["mujoco", "mjwarp"])
def test_batched_images_equal_single_worlds_bit_for_bit(name):
    scene = ant_with_eye()
    together = pictures(make(name, scene, 5))
    alone = make(name, scene, 1)
    eye, ant = alone.camera("eye"), alone.articulation("ant")
    ant.set_state(everywhere(alone), joint_pos=ant.joint_pos)  # marks the state as written, so images follow it
    for env in range(5):
        alone.qpos.copy_(together["qpos"][env : env + 1])
        alone.refresh()
        alone.draw()
        for output in ALL:
            assert torch.equal(getattr(eye, output)[0], together[output][env]), (env, output)
    assert not torch.equal(together["rgb"][0], together["rgb"][1])


@pytest.mark.parametrize("name", ["mujoco", "mjwarp"])
def test_thread_count_does_not_change_images(name):
    whole = pictures(make(name, ant_with_eye(), 7))
    for threads in (3, 7):
        shared = pictures(make(name, ant_with_eye(), 7, num_threads=threads))
        assert all(torch.equal(shared[output], whole[output]) for output in ALL)


@pytest.mark.parametrize("name", ["mjwarp", "newton"])
def test_simulators_render_equal_images(name):
    pytest.importorskip("newton" if name == "newton" else "mujoco_warp")
    expected, got = (pictures(make(each, ant_with_eye(), 4)) for each in ("mujoco", name))
    assert torch.equal(expected["qpos"], got["qpos"])
    assert all(torch.equal(expected[output], got[output]) for output in ALL)


def test_diverged_world_does_not_affect_other_images(make_sim):
    sim = make_sim(ant_with_eye(), 4)
    expected = pictures(sim)
    sim.qpos[1], sim.qpos[2] = math.nan, math.inf
    sim.draw()
    eye = sim.camera("eye")
    assert all(torch.equal(getattr(eye, output)[[0, 3]], expected[output][[0, 3]]) for output in ALL)


def test_captured_draw_equals_eager_draw():
    captured, eager = (pictures(make("mjwarp", ant_with_eye(), 4, graph=graph)) for graph in (True, False))
    assert all(torch.equal(captured[output], eager[output]) for output in ALL)


# Timing


def late_scene() -> Scene:
    scene = marble_scene()
    scene.add_camera("now", pos=(0, -3, 1), target=(0, 0, 0.5), size=(16, 16))
    scene.add_camera("late", pos=(0, -3, 1), target=(0, 0, 0.5), size=(16, 16), every=3)
    return scene


def test_camera_draws_every_third_step(make_sim):
    sim = make_sim(late_scene())
    now, late = sim.camera("now"), sim.camera("late")
    drawn(sim)
    assert torch.equal(now.rgb, late.rgb) and late.rgb.any()
    for step in range(1, 8):
        before = late.rgb.clone()
        sim.step(4)
        sim.refresh()
        sim.draw()
        assert now.age.tolist() == [0] * 3 and late.age.tolist() == [step % 3] * 3
        assert torch.equal(late.rgb, now.rgb if step % 3 == 0 else before)
        assert not torch.equal(now.rgb, before)
    drawn(sim, only(sim, 1))  # a single reset waits for the next frame
    assert late.age.tolist() == [2] * 3
    sim.step(1)
    drawn(sim)  # a reset of all worlds draws their first frame
    assert late.age.tolist() == [0] * 3 and torch.equal(late.rgb, now.rgb)


def test_state_dict_restores_camera_frames(make_sim):
    def steps(sim: Sim, count: int) -> list[Tensor]:
        for _ in range(count):
            sim.step(4)
            sim.refresh()
            sim.draw()
        return [value.clone() for name in ("now", "late") for value in (sim.camera(name).rgb, sim.camera(name).age)]

    sim, other = make_sim(late_scene()), make_sim(late_scene())
    for each in (sim, other):
        each.camera("now"), each.camera("late")
        drawn(each)
    shown = steps(sim, 4)
    other.load_state_dict(sim.state_dict())
    assert all(torch.equal(*pair) for pair in zip(shown, steps(other, 0), strict=True))
    for count in (1, 1, 1):
        assert all(torch.equal(*pair) for pair in zip(steps(sim, count), steps(other, count), strict=True))


class Watched(Cartpole):
    """Cartpole with a camera, which it uses if `asks`."""

    asks = True

    @classmethod
    def scene(cls, cfg: CartpoleConfig) -> Scene:
        scene = Cartpole.scene(cfg)
        scene.add_camera("side", pos=(0, -4, 2), target=(0, 0, 2), size=(24, 24), outputs=("segmentation",))
        return scene

    def __init__(self, cfg: CartpoleConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.side = sim.camera("side") if self.asks else None


class Unwatched(Watched):
    asks = False


def make_env(task: type[Cartpole], name: str = "mujoco", num_envs: int = 6) -> VecEnv:
    spec = prepare("Cartpole", num_envs=num_envs, device="cpu")
    choice = SimChoice(name, torch.device("cpu"), "test")
    return VecEnv.make(task, spec.cfg.task, num_envs=num_envs, choice=choice, sim=spec.cfg.sim, seed=1)


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """List with one entry per draw of the worlds."""
    found: list[None] = []
    launch = camera_renderer.CameraRenderer._launch
    monkeypatch.setattr(camera_renderer.CameraRenderer, "_launch", lambda self: (found.append(None), launch(self))[1])
    return found


@pytest.mark.parametrize("name", ["mujoco", "mjwarp"])
def test_env_draws_once_per_step_after_resets(name, frames):
    env = make_env(Watched, name)
    task: Any = env.task
    env.reset()
    frames.clear()
    seen_at: list[Tensor] = []
    observe = task.observe
    task.observe = lambda: (seen_at.append(task.side.segmentation.clone()), observe())[1]
    before = task.side.segmentation.clone()
    task.robot.set_state(only(env.sim, 2), joint_pos=torch.tensor([[3.5, 0.0]]).expand(6, 2))  # beyond its rail
    step = env.step(torch.zeros(6, 1))
    assert step.done.tolist() == [False, False, True, False, False, False] and len(frames) == 1
    at_end, at_start = seen_at
    assert torch.equal(at_end, before)  # no images are drawn for `final_obs`
    cart = env.sim.scene.model.body("cartpole/cart").id
    middle = (at_start[2] == cart).nonzero()[:, 1].float().mean()  # the cart is near the middle again
    assert abs(middle - 11.5) < 3
    expected = make_env(Watched, name)
    expected.reset()
    expected.sim.load_state_dict(env.sim.state_dict())
    expected.sim.draw()
    other: Any = expected.task
    assert torch.equal(other.side.segmentation, at_start)


@pytest.mark.parametrize("name", ["mujoco", "mjwarp"])
def test_unused_cameras_are_never_drawn(name, frames, monkeypatch):
    made: list[Any] = []
    monkeypatch.setattr(mujoco_warp, "create_render_context", lambda *_, **__: made.append(1))
    env = make_env(Unwatched, name)
    env.reset()
    for _ in range(3):
        env.step(torch.zeros(6, 1))
    assert frames == [] and made == []


def test_cameras_do_not_change_the_physics():
    plain, watched = make_env(Unwatched), make_env(Watched)
    steps = []
    for env in (plain, watched):
        env.reset()
        steps.append([env.step(torch.full((6, 1), 0.5)).obs["policy"] for _ in range(20)])
    assert all(torch.equal(*pair) for pair in zip(*steps, strict=True))


def test_drawing_does_not_synchronise():
    sim = make("mjwarp", late_scene(), 4, num_threads=1)
    cameras = [sim.camera("now"), sim.camera("late")]
    drawn(sim)
    where = only(sim, 1)
    sim._written_on_host = None  # type: ignore[attr-defined]  # a shortcut of the CPU only
    with SyncCounter() as syncs:
        for _ in range(4):
            sim.step(1)
            sim.reset(where)
            sim.refresh()
            sim.draw()
            _ = [(camera.rgb, camera.age) for camera in cameras]
    assert syncs.total == 0, syncs.locations


# Per-world parameters

FIELDS: dict[str, tuple[str | None, list[str] | None, Any]] = {
    "cam_pos": (None, ["eye"], [0.2, -3.0, 1.1]),
    "cam_quat": (None, ["eye"], [0.65, 0.76, 0.05, 0.0]),
    "light_pos": (None, ["marble/lamp"], [-2.0, -1.0, 2.0]),
    "light_dir": (None, None, [0.6, 0.0, -0.8]),
    "light_ambient": (None, None, [0.3, 0.0, 0.1]),
    "light_diffuse": (None, None, [0.2, 0.9, 0.2]),
    "mat_rgba": (None, ["ground"], [0.2, 1.0, 0.4, 1.0]),
    "geom_rgba": ("marble", None, [0.1, 0.2, 0.9, 1.0]),
    "cam_fovy": (None, ["eye"], 60.0),
}


def test_visual_parameters_are_per_world(make_sim):
    def watched(num_envs: int) -> tuple[Sim, Tensor]:
        scene = marble_scene()
        scene.add_camera("eye", pos=(0, -3, 1), target=(0, 0, 0.9), size=(40, 40))
        sim = make_sim(scene, num_envs)
        eye = sim.camera("eye")
        drawn(sim)  # before any parameter is declared
        return sim, eye.rgb

    (sim, rgb), (alone, own), (other, restored) = watched(3), watched(1), watched(3)
    shared = own.clone()
    for field, (owner, elements, value) in FIELDS.items():
        params = [one.param(field, owner, elements) for one in (sim, alone)]
        assert torch.allclose(params[0].value, params[0].default.expand_as(params[0].value))
        for param, one, world in zip(params, (sim, alone), (1, 0), strict=True):
            param.set(torch.tensor(value).expand_as(param.value).clone(), only(one, world))
            drawn(one)
        assert not torch.equal(own, shared)
        if field == "cam_fovy":  # rays computed per world differ in their last digits
            expected = enumerate((shared, own, shared))
            assert all((rgb[i].int() - x[0].int()).abs().float().mean() < 0.1 for i, x in expected)
        else:
            assert torch.equal(rgb, torch.cat([shared, own, shared])), field
        other.param(field, owner, elements)
        other.load_state_dict(sim.state_dict())
        assert torch.equal(restored, rgb), field
        for param, one in zip(params, (sim, alone), strict=True):
            param.set(param.default.expand_as(param.value).clone(), everywhere(one))


def test_every_visual_parameter_has_a_case():
    assert set(FIELDS) == {name for name, field in params.FIELDS.items() if field.pictures}


# Errors


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"name": "wrost"}, "needs pos"),
        ({"name": "marble/owm"}, "mean 'marble/own'"),
        ({"name": "marble/own", "pos": (0, 0, 1)}, "defines this camera"),
        ({"body": "marble/marbel"}, "mean 'marble/marble'"),
        ({"name": "there"}, "already"),
        ({"size": (64, 0)}, "4096 pixels, got (64, 0)"),
        ({"outputs": ("rgb", "normal")}, "got ('rgb', 'normal')"),
        ({"every": 0}, "every: expected"),
        ({"groups": (6,)}, "0 to 5"),
        ({"samples": 0}, "1 to 8, got 0"),
        ({"samples": 2, "outputs": ("depth",)}, "1 unless"),
        ({"fovy": 180.0}, "180"),
        ({"pos": (0, 0)}, "pos: expected 3 finite"),
        ({"quat": (0, 0, 0, 0)}, "quat: expected 4"),
        ({"quat": (1, 0, 0, 0), "target": (0, 0, 0)}, "mutually exclusive"),
        ({"target": (0, 0, 1)}, "other than pos"),
    ],
)
def test_invalid_camera_is_rejected_in_one_line(arguments, words):
    scene = marble_scene()
    scene.add_camera("there", pos=(0, 0, 1))
    place = {} if "name" in arguments and arguments["name"] != "there" else {"pos": (0, 0, 1)}
    with pytest.raises(TaskError) as info:
        scene.add_camera(**{"name": "eye", **place, **arguments})
    assert words in str(info.value) and "\n" not in str(info.value)


def test_missing_camera_is_an_error(make_sim):
    scene = marble_scene()
    scene.add_camera("eye", pos=(0, -3, 1))
    sim = make_sim(scene)
    with raises(TaskError, key="sim.camera", problem="no camera 'eyes'"):
        sim.camera("eyes")
    with raises(TaskError, hint="Try add_camera(..., outputs=('rgb', 'depth'))"):
        _ = sim.camera("eye").depth
    for name, words in (("cam_pos", "camera 'wrist'"), ("light_dir", "light 'wrist'"), ("mat_rgba", "material")):
        with pytest.raises(TaskError, match=f"no {words}"):
            sim.param(name, None, ["wrist"])
    with pytest.raises(TaskError, match="to the scene"):
        sim.param("cam_pos", "marble")


def test_undrawable_cameras_are_rejected():
    scene = marble_scene()
    scene.add_camera("empty", pos=(0, -3, 1), groups=(4, 5))
    scene.add_camera("smooth", pos=(0, -3, 1), samples=2)
    sim = make("mujoco", scene, 2)
    with pytest.raises(TaskError, match=r"'empty'.*groups \(4, 5\)"):
        sim.camera("empty")
    sim.camera("smooth")
    sim.param("cam_fovy", None, ["smooth"])
    with pytest.raises(TaskError, match=r"camera 'smooth': .*cam_fovy.* samples=1"):
        sim.draw()


@pytest.mark.parametrize("name", ["mujoco", "mjwarp"])
def test_insufficient_camera_memory_is_reported(name, monkeypatch):
    monkeypatch.setattr(camera_renderer, "memory_available_bytes", lambda: 5_000_000)
    scene = ant_with_eye()
    scene.add_camera("large", pos=(0, -4, 2), size=(400, 500), outputs=ALL)
    sim = make(name, scene, 8)
    sim.camera("eye")
    with pytest.raises(MemoryError, match=r"'large' .* 0\.0432 GB .* 0\.00452 GB"):
        sim.camera("large")


def test_out_of_memory_suggests_num_envs(monkeypatch):
    monkeypatch.setattr(camera_renderer, "memory_available_bytes", lambda: 1000)
    with raises(ConfigError, key="num_envs=6", hint="Try num_envs=3"), one_line_if_out_of_memory(6):
        make_env(Watched)


def test_missing_or_old_mujoco_warp_is_reported(monkeypatch):
    sim = make("mujoco", ant_with_eye(), 2)
    with (
        monkeypatch.context() as patch,
        raises(ConfigError, hint="Try pip install 'mujoco-warp>=4.0,<5'", key="a camera"),
    ):
        patch.setitem(sys.modules, "mujoco_warp", None)
        sim.camera("eye")
    monkeypatch.setattr(provenance, "installed_version", lambda name: "3.11.0" if name == "mujoco-warp" else "4.0.0")
    with pytest.raises(ConfigError, match=r"a camera needs mujoco-warp>=4.0,<5.*3.11.0"):
        sim.camera("eye")


@pytest.mark.filterwarnings("ignore:flex")
def test_camera_rejects_flexible_bodies():
    scene = scene_with(
        100,
        thing="""<mujoco><worldbody><body name="b"><freejoint/><geom size="0.1"/></body>
        <flexcomp name="cloth" type="grid" count="3 3 1" spacing=".1 .1 .1" radius=".01" dim="2" pos="0 0 2"/>
        </worldbody></mujoco>""",
    )
    scene.add_camera("eye", pos=(0, -3, 1))
    with pytest.raises(ConfigError, match="flexible bodies"):
        make("mujoco", scene, 1).camera("eye")


def test_closed_simulator_leaves_no_threads():
    before = {*threading.enumerate()}
    sim = make("mujoco", ant_with_eye(), 4, num_threads=2)
    sim.camera("eye")
    drawn(sim)
    started = {thread for thread in threading.enumerate() if thread.name.startswith("camera")} - before
    assert started
    sim.close()
    assert not any(thread.is_alive() for thread in started)


def test_scene_with_cameras_exports_unchanged():
    scene = scene_with(100, ant=ANT)
    scene.add_camera("eye", "ant/torso", (0.3, 0, 0), target=(1, 0, 0))
    model = mujoco.MjModel.from_xml_string(scene.spec.to_xml())
    assert model.camera("eye").bodyid == model.body("ant/torso").id
