"""Tests of the command `share`: the page's content and its refusals, and the page in headless Chromium."""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from copy import deepcopy
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from gpusim_rl.deployed import browser_mujoco
from gpusim_rl.deployed.exported_task import open_export
from gpusim_rl.deployed.share import LACKING, network, page
from gpusim_rl.deployed.walkers import Walkers
from gpusim_rl.errors import ConfigError
from gpusim_rl.export.model import write_numpy
from gpusim_rl.export.policy import OPERATIONS, DeployedPolicy, plain_function
from gpusim_rl.sim.robot_xml import bounded_memory
from helpers.commands import ROOT, load_file, run_here
from helpers.exports import AFTER_BALL, HOPPER, term, write_robot

CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]  # 3D on the CPU
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 1'>"
TERMS = [
    term("gyro", 3, "sensor gyro", 0.25, history=3),
    term("knee", 1, "joint positions from the pose"),
    term("clock", 1, "phase sine 0.8 0.5 standing 0.25"),
    term("actions", 1, "last action", 2.0, history=2),
    term("command", 1, "command x"),
]
NETWORK: list[Any] = [
    ["Gemm", ["obs", "weight", "bias"], "sum", {"transB": 1}],
    ["Tanh", ["sum"], "action", {}],
    ["Mul", ["action", "one"], "control", {}],
]
DOUBLINGS = [["Concat", [f"{'obs' if i == 0 else i}"] * 2, f"{i + 1}", {"axis": 1}] for i in range(26)]  # 3.7 GB


def write_export(folder: Path, nodes: list | None = None, scene: str = HOPPER, **changes: Any) -> Path:
    """Write an export of a robot with one joint, with a numpy version of the network, or of other `nodes`."""
    rng = np.random.default_rng(0)
    arrays = {"weight": rng.normal(size=(1, 14)).astype(np.float32), "bias": np.float32([0.1]), "one": np.float32(1)}
    made = [helper.make_node(name, sources, [result], **settings) for name, sources, result, settings in NETWORK]
    files = {"onnx": "policy.onnx", "numpy": "policy.npz", "scene": "scene.xml"}
    changes = {"commands": {"x": [-1.0, 1.0]}, "files": files, **changes}
    write_robot(folder, TERMS, made, arrays, scene, **changes)
    graph = {"nodes": nodes or NETWORK, "outputs": ["action", "control"]}
    np.savez(folder / "policy.npz", graph=json.dumps(graph), **arrays)
    return folder


def share(*arguments: str | Path, cwd: Path) -> Any:
    return run_here(ROOT / "tools" / "share.py", *arguments, cwd=cwd)


def unpacked(text: str) -> bytes:
    return gzip.decompress(base64.b64decode(text))


@pytest.fixture
def no_mujoco(monkeypatch):
    """Leave MuJoCo out: these tests read the page without running it."""
    monkeypatch.setattr("gpusim_rl.deployed.share.browser_files", lambda: {"code": "", "wasm": "A" * 3_400_000})


def test_page_holds_the_export_and_loads_nothing(tmp_path, no_mujoco):
    folder = write_export(tmp_path / "export")
    (folder / "LICENSE.robot").write_text("Hopper's licence")
    done = share("export", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("export/walk.html: 3.5 MB")
    text = (folder / "walk.html").read_text()
    [policy] = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    assert policy == "default-src 'none'; script-src 'unsafe-inline' 'wasm-unsafe-eval'; style-src 'unsafe-inline'"
    assert not re.search(r"(src|href)=|https?://", text), "the page names an address"
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1])
    assert unpacked(data["scene"]["scene.xml"]).decode() == HOPPER
    assert json.loads(unpacked(data["card"])) == json.loads((folder / "policy.json").read_text())
    licence = unpacked(data["licence"]).decode()
    assert "Apache License" in licence and "Hopper's licence" in licence
    arrays = json.loads(unpacked(data["graph"]))["arrays"]
    weights = np.frombuffer(unpacked(data["weights"]), "<f4")
    start = arrays["weight"]["start"]
    np.testing.assert_array_equal(weights[start : start + 14], np.load(folder / "policy.npz")["weight"].ravel())
    assert share("export", cwd=tmp_path).refuses("already exists")
    assert share("export", "--overwrite", cwd=tmp_path).returncode == 0


def test_names_in_an_export_do_not_become_html(tmp_path, no_mujoco):
    terms = [{**TERMS[0], "name": EVIL, "unit": EVIL}, *TERMS[1:]]
    text = page(write_export(tmp_path, task=EVIL, algorithm=EVIL, observation={"size": 14, "terms": terms}), 6.0)
    assert "window.evil" not in re.sub(r"<title>.*?</title>", "", text, flags=re.DOTALL)
    assert "<title>&lt;/script&gt;" in text and text.lower().count("</script") == 2


PICTURE = HOPPER.replace("<worldbody>", '<asset><texture name="t" type="2d" file="{}"/></asset><worldbody>')
CARD = {"observation": {"size": 14, "terms": [{**TERMS[0], "source": "task"}, *TERMS[1:]]}}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"recurrent_state": [{"input": "state_0"}]}, "recurrent policies do not run in the page"),
        (
            {"observation": {"size": 14, "terms": TERMS, "images": {"camera": [8, 8, 3]}}},
            "only the task can compute its observations",
        ),
        ({"files": {"onnx": "policy.onnx", "scene": "scene.xml"}}, "without a numpy version"),
        ({"scene_needs_mujoco": "3.17"}, "the scene needs MuJoCo 3.17, the page has 3.14.0"),
        (CARD, "only the task can compute gyro"),
        ({"observation": {"size": 13, "terms": TERMS}}, "the terms have 14 numbers, the observation 13"),
        ({"start": {"qpos": [math.nan], "qvel": []}}, "damaged export"),
        ({"joints": 7}, "damaged export"),
        ({"control_hz": 1e6, "physics_hz": 1e6}, "the page allows 1000 control steps a second"),
        ({"nodes": [["Einsum", ["obs"], "action", {}]]}, "the page has no operation Einsum"),
        ({"nodes": [[]]}, "damaged export"),
        ({"nodes": [*DOUBLINGS, *NETWORK]}, "requires more than 2048 MB of memory"),
        ({"scene": PICTURE.format("../secret.png")}, "'../secret.png', expected one in assets/"),
        ({"scene": PICTURE.format("assets/no.png")}, "no.png"),
        ({"scene": PICTURE.format("assets/link.png")}, "is a link to"),
        ({"files": {"onnx": "policy.onnx", "numpy": "../policy.npz", "scene": "no.xml"}}, "no.xml"),
    ],
)
def test_unsuitable_export_is_refused_in_one_line(tmp_path, no_mujoco, changes, words):
    folder = write_export(tmp_path / "export", **changes)
    (folder / "assets").mkdir()
    if "link.png" in changes.get("scene", ""):
        (folder / "assets" / "link.png").symlink_to("/etc/passwd")
    assert share("export", cwd=tmp_path).refuses(words)
    assert not (folder / "walk.html").exists()


def test_page_has_the_operations_of_policy_py():
    names = re.findall(r"\b([A-Z]\w+): (?:x|\()", (browser_mujoco.FOLDER / "robot.js").read_text())
    assert {*names, *LACKING} == {*OPERATIONS}


MISSING, MANY = object(), object()
VALUES = [
    *(MISSING, MANY, None, True, False, "", "x", "../x", "\ud800\x1b[2J", "x" * 100_000, math.nan, math.inf, -math.inf),
    *(-1, 0, 0.5, 7, 10**9, 10**400, 1e308, -1e308, 1e-308, [], {}, [None], [[]], ["x"], {"a": {}}, [0] * 1000),
    *([1e308] * 7, [math.nan] * 7, reduce(lambda inner, _: [inner], range(50), [])),
]


def places(node: Any, *place: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each entry of a card, of lists the first two."""
    entries = [*node.items()] if isinstance(node, dict) else [*enumerate(node)][:2] if isinstance(node, list) else []
    for key, value in entries:
        yield (*place, key)
        yield from places(value, *place, key)


def changed(card: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return the card with another value at a place."""
    new = deepcopy(card)
    parent, key = reduce(getitem, place[:-1], new), place[-1]
    if value is MISSING:
        del parent[key]
    else:
        parent[key] = [parent[key]] * 3000 if value is MANY else value
    return new


def run_command(number: int, folder: Path) -> None:
    """Load an export as stress, share, play or the example does, and take a step."""
    if number == 0:
        Walkers(folder, 2).step()
    elif number == 1:
        page(folder, 6.0).encode()
    elif number == 2:
        load_file(ROOT / "docs" / "examples" / "deploy.py", "deploy").main([str(folder), "--seconds", "0.02"])
    else:  # slow
        with closing(open_export(folder, 1, "trained")) as player:
            player.step()


@pytest.mark.parametrize("rounds", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_any_card_runs_or_is_refused_in_one_line(tmp_path, no_mujoco, rounds):
    folder, refused, tried = write_export(tmp_path / "export", scene_needs_mujoco="3.5"), 0, 0
    shutil.copy(ROOT / "gpusim_rl" / "export" / "policy.py", folder)
    card = json.loads((folder / "policy.json").read_text())
    for first in range(rounds):
        for number, place in enumerate(places(card), start=first):
            (folder / "policy.json").write_text(json.dumps(changed(card, place, VALUES[number * 7 % len(VALUES)])))
            try:
                with bounded_memory():
                    run_command(number % (3 if rounds == 1 else 4), folder)
            except (ConfigError, SystemExit) as error:
                text = str(error)
                refused += 1
                assert 10 < len(text) < 800 and "\n" not in text, place
            tried += 1
    assert tried // 4 < refused < tried


def test_page_above_the_limit_names_the_largest_parts(tmp_path, no_mujoco):
    folder = write_export(tmp_path / "export", scene=PICTURE.format("assets/t.png"))
    (folder / "assets").mkdir()
    noise = np.random.default_rng(0).integers(0, 255, (1000, 1000, 3), np.uint8)
    Image.fromarray(noise).save(folder / "assets" / "t.png")
    done = share("export", cwd=tmp_path)
    assert done.refuses("of which the scene's assets/t.png has 4.0. Expected at most 6 MB")
    assert share("export", "--max-mb", "9", cwd=tmp_path).returncode == 0


def test_missing_mujoco_is_explained_in_one_line(tmp_path, monkeypatch):
    write_export(tmp_path / "export")
    monkeypatch.setattr(browser_mujoco, "FILES", {name: tmp_path / name for name in browser_mujoco.FILES})
    monkeypatch.setattr(shutil, "which", lambda name: None)
    done = share("export", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 2) and done.stderr.startswith("downloading MuJoCo 3.14.0")
    assert "npm, which downloads it, is not installed. Try a wheel" in done.stderr
    fake = tmp_path / "npm"
    fake.write_text("#!/bin/sh\necho changed > mujoco-3.14.0.tgz\n")
    fake.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(fake))
    assert f"expected {browser_mujoco.SHA256}" in share("export", cwd=tmp_path).stderr
    assert not (tmp_path / "mujoco.wasm").exists(), "files with another hash were kept"


@pytest.fixture(scope="module")
def browser() -> Iterator:
    playwright = pytest.importorskip("playwright.sync_api")
    try:
        browser_mujoco.bring()
    except OSError as error:
        pytest.skip(f"no MuJoCo for browsers here: {error}")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


class Visit:
    """Visit of a page without network, with the simulator's clock stopped; `problems` must stay empty."""

    def __init__(self, browser: Any, file: Path, script: str = "", **context: Any) -> None:
        self.page = browser.new_context(offline=True, viewport={"width": 900, "height": 600}, **context).new_page()
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda line: self.problems.append(line.text))
        self.page.on("request", lambda request: self.problems.append(f"request {request.url}"))
        if script:
            self.page.add_init_script(script)
        self.page.goto(f"file://{file}")
        assert self.problems.pop(0) == f"request file://{file}"

    def ready(self) -> Visit:
        for _ in range(600):
            if self.page.evaluate("!!window.walk"):
                break
            self.page.wait_for_timeout(100)
        else:
            pytest.fail(self.page.inner_text("#status"))
        self.page.evaluate("walk.hold(), walk.robot.reset()")
        return self

    def __call__(self, script: str, *argument: Any) -> Any:
        return self.page.evaluate(script, *argument)

    def picture(self) -> np.ndarray:
        self("walk.camera.target = walk.robot.place(), walk.draw()")
        shot = self.page.screenshot(timeout=240_000)
        return np.asarray(Image.open(io.BytesIO(shot)).convert("L"), dtype=float)


def deployed_distance(folder: Path, seconds: float) -> float:
    """Return how far docs/examples/deploy.py walks at 0.5 m/s [m]."""
    deploy = load_file(ROOT / "docs" / "examples" / "deploy.py", "deploy")
    policy = DeployedPolicy(folder)
    robot = deploy.Robot(folder, policy.card)
    robot.command = {"x": 0.5, "y": 0.0, "yaw": 0.0}
    start = robot.place()
    deploy.run(robot, policy, deploy.Video(None, robot), seconds)
    return float(np.linalg.norm(robot.place() - start))


@pytest.mark.slow
@in_a_browser
@pytest.mark.timeout(900)
@pytest.mark.parametrize("demo, tolerance", [("Go1Velocity", 0.03), ("G1VelocityForward", 0.1)])
def test_robot_walks_in_a_browser_as_in_deploy(browser, exported, tmp_path, demo, tolerance):
    """G1's distance varies by 6 % with changes of 1e-6 rad in its initial joint angles."""
    folder = shutil.copytree(exported(demo), tmp_path / demo)
    assert share(folder, cwd=folder).returncode == 0
    assert (folder / "walk.html").stat().st_size < 6e6
    visit = Visit(browser, folder / "walk.html").ready()
    before = visit.picture()
    start = visit("walk.state()")
    visit("walk.command({x: 0.5, y: 0, yaw: 0}), walk.advance(10)")
    end = visit("walk.state()")
    assert end["time"] == pytest.approx(10.0) and end["falls"] == 0
    distance = math.dist(end["place"][:2], start["place"][:2])
    assert distance == pytest.approx(deployed_distance(folder, 10.0), rel=tolerance)
    visit("walk.push(0, 1.2), walk.advance(0.3)")
    after = visit.picture()
    for picture in (before, after):
        robot = picture[200:500, 200:500]
        assert robot.min() < 60 and robot.std() > 15, "no robot in the middle"
    assert np.abs(after - before)[:, :560].max() > 50
    observations = np.random.default_rng(0).normal(size=(200, visit("walk.robot.card.observation.size")))
    action, control = plain_function((folder / "policy.npz").read_bytes())({"obs": observations.astype(np.float32)})
    run = "rows => rows.map(row => walk.robot.policy.run(Float32Array.from(row)).map(x => [...x.data]))"
    for i, expected in enumerate((action, control)):
        got = np.array([row[i] for row in visit(run, observations.tolist())])
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=2e-6)
    assert visit.problems == []


# Layer norm of every second of the columns 2 to 12, as torch writes it: operator, result, inputs
NORM = """Slice seen obs from to axis by
ReduceMean mean seen last
Sub centred seen mean
Pow square centred two
ReduceMean variance square last
Add above variance eps
Sqrt deviation above
Div normal centred deviation
MatMul action normal weights
Tanh control action"""


def layer_norm(opset: int) -> onnx.ModelProto:
    """Return a policy with a layer norm."""
    numbers = {"from": [2], "to": [-1], "axis": [1], "by": [2], "last": [-1]}
    arrays = {name: np.array(value, np.int64) for name, value in numbers.items()}
    arrays["weights"] = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    nodes = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.float32(value)))
        for name, value in (("two", 2.0), ("eps", 1e-5))
    ]
    for kind, result, *inputs in map(str.split, NORM.splitlines()):
        by_attribute = kind == "ReduceMean" and opset < 18
        axes = {"axes": [-1]} if by_attribute else {}
        nodes.append(helper.make_node(kind, inputs[: 1 if by_attribute else None], [result], **axes))
    sizes = {"obs": 14, "action": 2, "control": 2}
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size]) for name, size in sizes.items()]
    graph = helper.make_graph(nodes, "norm", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.fixture
def normalised(tmp_path, request) -> tuple[Path, np.ndarray, list[np.ndarray]]:
    """policy.npz of a layer norm, observations, and onnxruntime's outputs."""
    onnx.save(layer_norm(request.param), tmp_path / "policy.onnx")
    assert write_numpy(tmp_path / "policy.onnx", tmp_path / "policy.npz")
    obs = np.random.default_rng(1).normal(size=(20, 14)).astype(np.float32)
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx", providers=["CPUExecutionProvider"])
    return tmp_path / "policy.npz", obs, session.run(None, {"obs": obs})


@pytest.mark.parametrize("normalised", [17, 18], indirect=True)
def test_layer_norm_runs_in_numpy(normalised):
    file, obs, expected = normalised
    got = plain_function(file.read_bytes())({"obs": obs})
    assert all(np.allclose(a, b, rtol=0.0, atol=1e-5) for a, b in zip(got, expected, strict=True))


@in_a_browser
@pytest.mark.parametrize("normalised", [17, 18], indirect=True)
def test_layer_norm_runs_in_the_page(normalised):
    playwright = pytest.importorskip("playwright.sync_api")
    file, obs, expected = normalised
    graph, weights = network(file)
    run = """([graph, weights, rows]) => {
        const policy = new Policy(graph, Uint8Array.from(weights).buffer, []);
        return rows.map(row => policy.run(Float32Array.from(row)).map(x => [...x.data]));
    }"""
    with playwright.sync_playwright() as running:
        page = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS).new_page()
        page.add_script_tag(path=browser_mujoco.FOLDER / "robot.js")
        rows = page.evaluate(run, [graph, [*weights], obs.tolist()])
        graph["example"] = [obs[0].tolist(), (expected[0][0] + 0.01).tolist()]
        with pytest.raises(Exception, match="compute other actions"):
            page.evaluate(run.replace("return", "return policy.check(),"), [graph, [*weights], []])
    for i, values in enumerate(expected):
        np.testing.assert_allclose([row[i] for row in rows], values, rtol=0.0, atol=1e-5)


@pytest.fixture(scope="module")
def hopper(tmp_path_factory) -> Path:
    folder = write_export(tmp_path_factory.mktemp("hopper"), task=EVIL, **AFTER_BALL)
    (folder / "walk.html").write_text(page(folder, 6.0))
    return folder / "walk.html"


@pytest.mark.slow
@in_a_browser
@pytest.mark.timeout(600)
def test_page_runs_the_card_of_any_robot(browser, hopper):
    """Scales, histories, phase, keys, disturbances, falls, and names that look like HTML."""
    visit = Visit(browser, hopper).ready()
    assert visit("document.querySelector('h1').textContent") == EVIL and visit("window.evil") is None
    policy = DeployedPolicy(hopper.parent, plain=True)
    rng, read = np.random.default_rng(1), "[...walk.robot.read('phase sine 0.8 0.5 standing 0.25')]"
    visit("walk.robot.policy.reset()")
    for _ in range(4):
        values = {term["name"]: rng.normal(size=term["size"]).tolist() for term in TERMS if term["name"] != "actions"}
        policy.act(values)
        got = visit("values => (walk.robot.policy.act(values), [...walk.robot.policy.action])", values)
        np.testing.assert_allclose(got, policy.action, rtol=1e-6, atol=1e-6)
    assert visit(read) == [0.25]
    visit("walk.command({x: 1}), walk.robot.reset(), walk.advance(0.1)")
    assert visit(read) == pytest.approx([math.sin(2 * math.pi * 0.1 / 0.8 + 0.5)])
    walkers = Walkers(hopper.parent, 1)
    walkers.command[:] = 1.0
    for _ in range(5):
        walkers.step()
    assert visit("[...walk.robot.data.qpos]") == pytest.approx(walkers.qpos[0].tolist(), abs=1e-6)
    command = "walk.robot.command.x"
    for keys, value in ((["ArrowUp"], 1.0), (["KeyS"], -1.0), (["KeyW", "ArrowDown"], 0.0)):
        visit("walk.command({x: 0})")
        for key in keys:
            visit.page.keyboard.down(key)
        assert visit(command) == value
        for key in keys:
            visit.page.keyboard.up(key)
        assert visit(command) == 0.0
    visit("walk.robot.disturb({friction: 0.5, payload: 2}), walk.robot.delay = 0.02")
    masses = visit("[walk.robot.model.body_mass[2], walk.robot.model.body_subtreemass[0], walk.robot.weight]")
    assert masses[0] == pytest.approx(visit("walk.robot.mass") + 2) and masses[1] == pytest.approx(masses[2] + 2)
    visit("walk.advance(0.1)")
    assert visit("walk.robot.queue.length") == 5, "20 ms are four physics steps"
    visit("walk.robot.reset(), walk.robot.data.qpos.set([0, 0, 0.5, 0, 1, 0, 0], 7), walk.advance(0.1)")
    assert visit("walk.state().falls") == 1 and visit.page.locator("#falls").inner_text() == "0"
    visit("walk.advance(2.2), walk.draw()")
    assert visit("walk.state().falls") == 1 and visit("walk.robot.fallen") is False, "the robot stands up again"
    assert visit.page.locator("#falls").inner_text() == "1"
    before = visit("walk.held = false, walk.state().time")
    visit.page.wait_for_timeout(3000)
    assert visit("walk.hold(), walk.state().time") > before, "the page does not run by itself"
    assert visit.problems == []


@pytest.mark.slow
@in_a_browser
def test_robot_can_be_pushed_by_dragging_it(browser, hopper):
    visit = Visit(browser, hopper).ready()
    visit("walk.robot.reset(), walk.camera.target = walk.robot.place(), walk.draw()")
    x, y = (900 - 316) / 2, 300
    visit.page.mouse.move(x, y)
    visit.page.mouse.down()
    visit.page.mouse.move(x + 80, y, steps=4)
    assert visit("!!walk.robot.grab"), "the robot is not in the middle"
    before = visit("walk.state().place")
    visit("walk.advance(0.2)")
    pulled = np.subtract(visit("walk.state().place"), before) @ visit("walk.picture.seen.right")
    assert pulled > 0.02 and np.abs(visit("[...walk.robot.data.xfrc_applied]")).max() > 1
    visit.page.mouse.up()
    visit("walk.advance(0.1)")
    assert not np.any(visit("[...walk.robot.data.xfrc_applied]"))
    azimuth = visit("walk.camera.azimuth")
    visit.page.mouse.move(40, 300)
    visit.page.mouse.down()
    visit.page.mouse.move(90, 300)
    visit.page.mouse.up()
    assert visit("walk.camera.azimuth") < azimuth and visit.problems == []


ASSETS = """<asset>
    <mesh name="m" vertex="0 0 0 1 0 0 0 1 0 0 0 1"/>
    <hfield name="h" nrow="3" ncol="3" size="1 1 0.5 0.1" elevation="0 0 0 0 1 0 0 0 0"/>
  </asset><worldbody>
    <geom type="mesh" mesh="m" pos="0.5 0.5 0" rgba="1 0 0 1"/>
    <geom type="hfield" hfield="h" pos="-1.5 0 0"/>
    <geom type="cylinder" size="0.1 0.2" pos="0 1 0.2" rgba="0 0.5 1 0.5"/>
    <geom type="ellipsoid" size="0.1 0.2 0.3" pos="0 -1 0.3"/>"""


@pytest.mark.slow
@in_a_browser
def test_page_draws_every_kind_of_shape(browser, tmp_path):
    folder = write_export(tmp_path / "export", scene=HOPPER.replace("<worldbody>", ASSETS))
    (folder / "walk.html").write_text(page(folder, 6.0))
    visit = Visit(browser, folder / "walk.html").ready()
    shapes = ["mesh0", "terrain0", "cylinder", "sphere", "plane", "box", "sphere"]
    assert visit("walk.picture.geoms.map(geom => geom.shape)") == shapes
    visit("walk.camera.distance = 5")
    counts = visit("['mesh0', 'terrain0'].map(name => walk.picture.shapes[name].count)")
    assert counts == [4 * 3, 4 * 2 * 3]
    picture = visit.picture()
    visit("walk.picture.geoms = walk.picture.geoms.filter(geom => !/mesh|terrain/.test(geom.shape))")
    assert (np.abs(visit.picture() - picture)[:, :560] > 30).mean() > 0.01, "mesh and terrain are not drawn"
    assert visit("walk.picture.gl.getError()") == 0 and visit.problems == []


@pytest.mark.slow
@in_a_browser
@pytest.mark.parametrize(
    "script, words",
    [
        ("delete window.WebAssembly", "needs a browser with WebAssembly"),
        ("HTMLCanvasElement.prototype.getContext = () => null", "no WebGL 2 in this browser: the robot is simulated"),
    ],
)
def test_missing_feature_of_the_browser_is_one_visible_line(browser, hopper, script, words):
    visit = Visit(browser, hopper, script)
    visit.page.get_by_text(words).wait_for(timeout=60_000)
    assert visit.page.locator("#status").is_visible() and "\n" not in visit.page.inner_text("#status")
    if "WebGL" in words:
        visit.ready()("walk.advance(1), walk.draw()")
        assert visit("walk.state().time") == pytest.approx(1.0)
    assert visit.problems == []
