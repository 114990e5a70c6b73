"""Tests of terrain: shapes of patches, height table against MuJoCo's rays, balls on two simulators."""

from __future__ import annotations

import dataclasses
import math

import mujoco
import numpy as np
import pytest
import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.sim import Scene
from gpusim_rl.sim.terrain import KINDS, TREAD, Terrain, TerrainConfig
from helpers.raised import raises
from helpers.scenes import BALL, advance, everywhere, make

LEVELS, PATCH, PLATFORM, RESOLUTION = 5, 8.0, 3.0, 0.1
CELLS = round(PATCH / RESOLUTION)
RANDOM = ("rough", "rough_slope_up", "rough_slope_down", "obstacles", "stepping_stones")


def config(**changes) -> TerrainConfig:
    values = {"seed": 3, "levels": LEVELS, "columns": dict.fromkeys(KINDS, 1), "patch_size": PATCH}
    values |= {"platform_size": PLATFORM, "resolution": RESOLUTION, "height_step": 0.005, "border": 6.0}
    return TerrainConfig(**{**values, **changes})


@pytest.fixture(scope="module")
def terrain() -> Terrain:
    return Terrain(config())


@pytest.fixture(scope="module")
def model(terrain) -> mujoco.MjModel:
    scene = Scene(physics_hz=200)
    scene.add_terrain(terrain)
    return scene.model


def patch(terrain: Terrain, kind: str, level: int) -> np.ndarray:
    """Return the heights of a patch including its edges, shape [x, y]."""
    column = terrain.kinds.index(kind)
    rows = slice(level * CELLS, (level + 1) * CELLS + 1)
    return terrain.heights[rows, column * CELLS : (column + 1) * CELLS + 1].numpy()


def middle_line(terrain: Terrain, kind: str, level: int) -> np.ndarray:
    """Return the heights from the middle of a patch to its edge along +x."""
    return patch(terrain, kind, level)[CELLS // 2 :, CELLS // 2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", range(LEVELS))
def test_patches_have_a_flat_platform_and_edges_at_zero(terrain, kind, level):
    heights = patch(terrain, kind, level)
    half = round(0.5 * PLATFORM / RESOLUTION)
    platform = heights[CELLS // 2 - half : CELLS // 2 + half + 1, CELLS // 2 - half : CELLS // 2 + half + 1]
    origin = terrain.origins[level, terrain.kinds.index(kind)]
    assert platform.shape == (31, 31) and (platform == origin[2].item()).all()
    assert not any(edge.any() for edge in (heights[0], heights[-1], heights[:, 0], heights[:, -1]))
    x = (level + 0.5 - 0.5 * LEVELS) * PATCH
    y = (terrain.kinds.index(kind) + 0.5 - 0.5 * len(KINDS)) * PATCH
    assert origin[:2].tolist() == pytest.approx([x, y])


def test_heights_are_multiples_of_the_height_step(terrain):
    steps = terrain.heights.double() / 0.005
    assert (steps - steps.round()).abs().max() < 1e-4 and terrain.heights.unique().numel() > 100


@pytest.mark.parametrize("kind", KINDS)
def test_difficulty_grows_with_the_level(terrain, kind):
    if kind == "stepping_stones":
        area = [(patch(terrain, kind, level) < 0).mean() for level in range(LEVELS)]
    elif kind == "gap":
        area = [(middle_line(terrain, kind, level) < 0).sum() for level in range(LEVELS)]
    else:
        area = [np.abs(np.diff(patch(terrain, kind, level), axis=0)).max() for level in range(LEVELS)]
    assert area == sorted(area) and area[-1] > 1.5 * area[0]


@pytest.mark.parametrize("kind", ["slope", "rough_slope", "stairs"])
def test_up_patches_start_in_a_pit_and_down_patches_on_a_hill(terrain, kind):
    for level in range(1, LEVELS):
        up, down = (terrain.origins[level, terrain.kinds.index(f"{kind}_{way}"), 2] for way in ("up", "down"))
        assert up == -down < 0


@pytest.mark.parametrize("level", range(LEVELS))
def test_stairs_have_level_treads_and_equal_risers(terrain, level):
    rises = np.diff(middle_line(terrain, "stairs_up", level))
    riser = round((0.05 + 0.175 * level / LEVELS) / 0.005) * 0.005
    (places,) = np.nonzero(rises)
    assert len(places) == 8
    assert rises[places] == pytest.approx(riser, abs=0.0051)  # rounded to the height step
    assert set(np.diff(places)) == {round(TREAD / RESOLUTION)}


@pytest.mark.parametrize("level", range(LEVELS))
def test_slopes_have_constant_inclination(terrain, level):
    line = middle_line(terrain, "slope_down", level)
    foot = line[round(0.5 * PLATFORM / RESOLUTION) :]
    expected = 0.4 * level / LEVELS * (foot.size - 1 - np.arange(foot.size)) * RESOLUTION
    assert foot == pytest.approx(expected, abs=0.0026)


@pytest.mark.parametrize("level", [0, LEVELS - 1])
def test_gaps_have_the_configured_width(terrain, level):
    line = middle_line(terrain, "gap", level)
    width = 0.2 + 0.8 * level / LEVELS
    assert set(line) == {0.0, np.float32(-1.0)}
    assert (line < 0).sum() + 1 == round(width / RESOLUTION)  # between the level points on both sides


def test_overlapping_obstacles_do_not_add_up(terrain):
    for level in range(LEVELS):
        highest = 0.025 + 0.15 * level / LEVELS
        heights = np.unique(patch(terrain, "obstacles", level))
        assert len(heights) == 5  # two kinds of boxes, two of holes, and the ground
        assert heights == pytest.approx([-highest, -highest / 2, 0.0, highest / 2, highest], abs=0.0026)


def test_seed_changes_only_random_terrain_kinds(terrain):
    same, other = Terrain(config()), Terrain(config(seed=4))
    assert torch.equal(terrain.heights, same.heights)
    for column, kind in enumerate(terrain.kinds):
        part = slice(column * CELLS, (column + 1) * CELLS)
        differs = not torch.equal(terrain.heights[:, part], other.heights[:, part])
        assert differs == (kind in RANDOM), kind
    rough = [patch(terrain, "rough", level) / np.abs(patch(terrain, "rough", level)).max() for level in (0, 1)]
    assert np.abs(rough[0] - rough[1]).max() > 0.5


def test_columns_follow_the_configured_order():
    terrain = Terrain(config(levels=2, columns={"gap": 1, "stairs_up": 2, "slope_down": 1}))
    assert terrain.kinds == ["gap", "stairs_up", "stairs_up", "slope_down"]
    assert terrain.heights.shape == (2 * CELLS + 1, 4 * CELLS + 1) and terrain.half_size == (8.0, 16.0)
    assert (terrain.origins[1, :, 2].sign() == torch.tensor([0.0, -1.0, -1.0, 1.0])).all()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"columns": {"stairs": 1}}, "terrain.columns"),
        ({"platform_size": 8.0}, "terrain.platform_size"),
        ({"patch_size": 8.05}, "terrain.patch_size"),
        ({"platform_size": 3.1}, "terrain.platform_size"),
        ({"resolution": 1e18}, "terrain.patch_size"),
        ({"resolution": 1e-320}, "terrain"),
        ({"levels": 10**6}, "terrain"),
    ],
)
def test_invalid_terrain_is_rejected_in_one_line(change, key):
    with raises(ConfigError, key=key) as error:
        config(**change)
    assert "\n" not in str(error.value)


def rays(model: mujoco.MjModel, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the ground height by MuJoCo's ray caster."""
    data, geom = mujoco.MjData(model), np.zeros(1, dtype=np.int32)
    mujoco.mj_forward(model, data)
    down = np.array([0.0, 0.0, -1.0])
    starts = torch.stack([x, y, torch.full_like(x, 10.0)], dim=1).double().numpy()
    distances = [mujoco.mj_ray(model, data, start, down, None, 1, -1, geom, None) for start in starts]
    return 10.0 - torch.tensor(distances)


def test_heights_match_mujoco_ray_casts(terrain, model):
    random = torch.Generator().manual_seed(0)
    num = 20_000
    xy = 2.0 * torch.rand(num, 2, generator=random) - 1.0
    x, y = (xy * (torch.tensor(terrain.half_size) + 5.0)).unbind(dim=1)  # on the border too
    nodes = torch.randint(1, CELLS * LEVELS, (500, 2), generator=random)  # and near points of the grid
    near = 0.02 * torch.randn(500, 2, generator=random)
    x = torch.cat([x, nodes[:, 0] * RESOLUTION - terrain.half_size[0] + near[:, 0]])
    y = torch.cat([y, nodes[:, 1] * RESOLUTION - terrain.half_size[1] + near[:, 1]])
    height = terrain.height(x, y)
    error = (height.double() - rays(model, x, y)).abs()
    assert error.max() < 1e-4 and error.median() < 1e-6
    assert (height < -0.5).any() and (height > 0.5).any() and (height == 0.0).any()


def test_far_away_and_nan_positions_read_a_height(terrain):
    lost = torch.tensor([9e4, -9e4, math.inf, -math.inf, math.nan])
    for x, y in ((lost, torch.zeros(5)), (torch.zeros(5), lost), (lost, lost)):
        assert terrain.height(x, y)[:2].tolist() == [0.0, 0.0]


def test_height_scan_rotates_with_yaw(terrain):
    random = torch.Generator().manual_seed(1)
    pos = 30.0 * torch.rand(16, 3, generator=random) - 15.0
    yaw = 8.0 * torch.rand(16, generator=random) - 4.0
    points = torch.tensor([[0.0, 0.0], [0.8, 0.0], [0.0, 0.5], [-0.3, -0.2]])
    expected = torch.empty(16, 4)
    for world in range(16):
        for number, (ahead, left) in enumerate(points.tolist()):
            x = pos[world, 0] + ahead * yaw[world].cos() + left * (yaw[world] + math.pi / 2).cos()
            y = pos[world, 1] + ahead * yaw[world].sin() + left * (yaw[world] + math.pi / 2).sin()
            expected[world, number] = terrain.height(x[None], y[None])
    torch.testing.assert_close(terrain.scan(pos, yaw, points), expected, atol=2e-4, rtol=0.0)
    assert expected.std() > 0.05


def ball_on(terrain: Terrain, radius: float = 0.1) -> Scene:
    scene = Scene(physics_hz=200)
    scene.add_terrain(terrain)
    scene.add("ball", mujoco.MjSpec.from_string(BALL.replace('size="0.1"', f'size="{radius}"')))
    scene.add_contact_sensor("ball", ["ball"])
    return scene


def test_adding_terrain_recompiles_the_scene(terrain):
    scene = Scene(physics_hz=200)
    assert scene.model.ngeom == 0
    scene.add_terrain(terrain)
    assert scene.model.ngeom == 5
    flat = Scene(physics_hz=200)
    flat.add_terrain(Terrain(dataclasses.replace(terrain.cfg, columns={"slope_up": 1}, levels=1, border=0.0)))
    assert flat.model.ngeom == 1 and flat.model.hfield_data.max() == 0.0


@pytest.mark.parametrize("name", ["mujoco", pytest.param("mjwarp", marks=pytest.mark.slow)])
def test_balls_rest_on_platforms_and_border(terrain, name):
    origins = terrain.origins.flatten(0, 1)
    outside = torch.tensor([[s * (terrain.half_size[0] + 2.0), y, 0.0] for s in (-1, 1) for y in (-9.0, 11.0)])
    places = torch.cat([origins, outside])
    sim = make(name, ball_on(terrain), len(places))
    ball = sim.articulation("ball")
    contacts = ball.contacts(["ball"])
    above = torch.tensor([0.03, -0.02, 0.12])
    ball.set_state(everywhere(sim), root_pos=places + above)
    sim.refresh()
    advance(sim, 200)
    height = ball.root_pos[:, 2] - places[:, 2]
    assert ((height - 0.1).abs() < 3e-3).all() and ball.root_lin_vel.abs().max() < 0.02
    assert contacts.force[:, 0, 2] == pytest.approx(2.0 * 9.81, rel=0.02) and not sim.overflow.any()


@pytest.mark.parametrize(("name", "num"), [("mujoco", 400), ("mjwarp", 40)])
def test_falling_balls_stay_above_steps_and_slopes(name, num):
    without_cliffs = {kind: 1 for kind in KINDS if kind not in ("gap", "stepping_stones")}
    terrain = Terrain(config(columns=without_cliffs))
    radius = 0.04
    random = torch.Generator().manual_seed(0)
    xy = (2.0 * torch.rand(num, 2, generator=random) - 1.0) * torch.tensor(terrain.half_size)
    sim = make(name, ball_on(terrain, radius), num)
    ball = sim.articulation("ball")
    around = xy[:, None] + 0.1 * torch.randn(num, 20, 2, generator=random)
    above = terrain.height(*around.unbind(dim=2)).amax(dim=1)
    pos, vel = torch.cat([xy, above[:, None] + 0.4], dim=1), torch.randn(num, 3, generator=random)
    ball.set_state(everywhere(sim), root_pos=pos, root_lin_vel=vel)
    sim.refresh()
    touched = torch.zeros(num, dtype=torch.bool)
    for _ in range(200):
        sim.step(1)
        x, y, z = ball.root_pos.unbind(dim=1)
        clearance = z - terrain.height(x, y)
        assert (clearance < 0.0).sum() <= 1  # a ball may briefly penetrate the side of a step
        touched |= clearance < radius
    assert touched.float().mean() > 0.95 and clearance.min() > 0.0
    assert not sim.overflow.any() and not sim.diverged.any()
