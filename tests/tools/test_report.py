"""Tests of the command `report`: a self-contained page of runs."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpusim_rl.errors import ConfigError
from gpusim_rl.files.safe_open import dump_yaml
from gpusim_rl.learned import Learned
from gpusim_rl.run.console import Console
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.view import charts, curves
from gpusim_rl.view import report as reports
from gpusim_rl.view.charts import chart

pytest_plugins = ["helpers.tool_runs"]

VOID = {"meta", "img", "br", "link"}


class Page(HTMLParser):
    """HTML parser that checks nesting and collects texts, classes and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.classes: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.classes += [value for name, value in attrs if name == "class" and value]
        self.loads += [value for name, value in attrs if name in ("src", "href", "data", "action", "poster")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(filter(None, self.texts))


def folders(runs_folder: Path, task: str = "Cartpole") -> list[Path]:
    return sorted(path for path in (runs_folder / "runs" / task).iterdir() if path.name != "latest")


@pytest.fixture
def seeds(runs_folder, tmp_path) -> list[Path]:
    """Copies of the runs with seeds 1, 2 and 3; the third has other settings."""
    return [shutil.copytree(folder, tmp_path / f"seed{i + 1}") for i, folder in enumerate(folders(runs_folder))]


@pytest.fixture
def write(load_tool, tmp_path):
    tool = load_tool("report")

    def written(*runs: Path, options: tuple[str, ...] = ("--no-replay",)) -> tuple[Page, str]:
        out = tmp_path / "page.html"
        words = [*map(str, runs), "--out", str(out), "--overwrite", *options]
        assert tool.report(tool.parse(words)) == out
        text = out.read_text()
        return Page(text), text

    return written


def cut(folder: Path, rows: int, *last_words: str) -> None:
    """Truncate a run after `rows` rows, with these last lines in its log."""
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join(lines[: rows + 1]))
    (folder / "train.log").unlink()
    console = Console("quiet", 6, folder / "train.log")
    console.note(f"iteration {rows}/6 | return 1", *last_words)
    console.close()


def put_returns(folder: Path, returns: list[float]) -> None:
    lines = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    column = lines[0].index("episode/return")
    for line, value in zip(lines[1:], returns, strict=True):
        line[column] = str(value)
    (folder / "metrics.csv").write_text("".join(",".join(line) + "\n" for line in lines))


def first_chart(text: str) -> str:
    return re.findall(r'<svg class="chart".*?</svg>', text, re.DOTALL)[0]


@pytest.fixture
def no_charts(monkeypatch):
    monkeypatch.setattr(reports, "chart", lambda groups, **_: "<svg></svg>" * any(len(c.x) for c in groups[0]))


def test_report_groups_seeds_by_settings(no_charts, write, seeds):
    page, text = write(*seeds)
    assert "2 groups of runs" in page.text
    assert "Cartpole ppo.learning_rate=0.001" in page.text and "2 seeds" in page.text
    assert page.text.count("threshold 470") >= 2 and "0 of 2 seeds" in page.text and "not reached" in page.text
    for words in ("ppo.horizon", "torch 2.", "explained variance", "cart velocity", "env steps per second"):
        assert words in page.text
    assert re.search(r"train\S* device=cpu .* num_envs=16 max_iterations=6 -m seed=1,2", page.text)
    assert re.search(r"train\S* .* ppo.learning_rate=1e-3 seed=3", page.text)
    assert "Cross:" not in page.text and "Ring:" not in page.text
    assert "@media (prefers-color-scheme: dark)" in text


def test_report_loads_no_resources(write, seeds):
    page, text = write(seeds[0])
    assert page.loads == [] and "script" not in page.tags
    assert not re.search(r"https?://|url\((?!#)|@import", text)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) and 'class="failed"' not in text and 'class="mean-ends"' not in text
    assert not re.search(r"#0000[0-9a-f]{2}|font-family|<style[^>]*>\*", text) and "stroke: var(--c0)" in text
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert policy.startswith("default-src 'none'") and "http" not in policy and "*" not in policy


def test_report_has_charts_per_task_even_without_episodes(no_charts, write, seeds, runs_folder):
    ant = folders(runs_folder, "Ant")[0]  # too short for an episode to end
    page, _ = write(seeds[0], ant)
    assert "Cartpole, Ant" in page.text and page.tags.count("h1") == 2
    assert "no episode yet" in page.text


def test_names_in_reports_are_escaped(no_charts, write, seeds):
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'"
    config = curves.read_run(seeds[0]).config
    config["task"]["_target_"] = f"a.b.Cart{evil}"
    config["task"][evil] = evil
    (seeds[0] / "config.yaml").write_bytes(dump_yaml(config))
    (seeds[0] / "overrides.yaml").write_bytes(dump_yaml(["task=Cartpole", f"wandb_name={evil}"]))
    lines = (seeds[0] / "metrics.csv").read_text().split("\n")
    lines[0] = lines[0].replace("reward/death", f"reward/{evil}".replace('"', ""))
    (seeds[0] / "metrics.csv").write_text("\n".join(lines))
    cut(seeds[0], 3, f"ended by {evil}: {evil}")
    page, text = write(seeds[0])
    assert "<script" not in text and "<img" not in text and "script" not in page.tags
    assert page.text.count("<script>alert(1)</script>") >= 5


def only_returns(monkeypatch) -> None:
    def return_chart(*lines, label, **options):
        return charts.chart(*lines, label=label, **options) if label.startswith("episode/return") else ""

    monkeypatch.setattr(reports, "chart", return_chart)


def test_mean_curve_ends_with_the_shortest_seed(write, seeds, monkeypatch):
    put_returns(seeds[0], [10.0, 20, 30, 40, 50, 60])
    put_returns(seeds[1], [0.0, 0, 0, 0, 0, 0])
    cut(seeds[1], 3, "next:")
    only_returns(monkeypatch)
    page, text = write(*seeds[:2])
    assert "iteration 3 of 6" in page.text and "Ring:" in page.text
    chart = first_chart(text)
    paths = re.findall(r'<path d="(M [^"]*)"[^>]*style="fill: none; stroke: var\(--c0\)', chart)
    points = [[tuple(map(float, point.split())) for point in re.split("[ML]", path)[1:]] for path in paths]
    mean, *thin = points
    ends = [line[-1][0] for line in points]
    assert ends[0] == min(ends) and ends[1] > 1.8 * (ends[0] - 52) + 52, "mean continues without the short seed"
    heights = [y for _, y in mean]
    assert len(thin) == 2 and heights == sorted(heights, reverse=True)
    assert 'class="mean-ends"' in chart and 'class="stopped"' in chart


def test_crashed_seed_is_named(write, seeds, monkeypatch):
    only_returns(monkeypatch)
    cut(seeds[1], 2, "ended by RuntimeError: the simulator <broke>")
    page, text = write(*seeds[:2])
    assert "RuntimeError: the simulator <broke>, after iteration 2 of 6" in page.text
    assert "Cross:" in page.text and 'class="failed"' in first_chart(text)


def test_report_distinguishes_endings_of_runs(seeds, monkeypatch):
    def ending() -> reports.Ending:
        return reports.ending(curves.read_run(seeds[0]))

    assert ending() == reports.Ending("complete", "complete: iteration 6 of 6")
    cut(seeds[0], 4, "ended by KeyboardInterrupt: ", "iteration 4/6 | resumed")
    assert ending().kind == "training" and "iteration 4 of 6" in ending().words
    monkeypatch.setattr(reports, "STILL_TRAINS_S", -1.0)
    assert ending().kind == "failed" and "iteration 4 of 6" in ending().words
    (seeds[0] / "train.log").unlink()
    assert ending().kind == "failed"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["empty"], "config.yaml"),
        (["Nothing"], "no run 'Nothing': "),
        (["Cartpole", "--out", "x.pdf"], "got 'x.pdf'"),
        (["Cartpole", "--out", "new/x.html"], "--out new/x.html: "),
    ],
)
def test_bad_input_is_rejected_in_one_line(tool_here, runs_folder, arguments, line):
    (runs_folder / "empty").mkdir(exist_ok=True)
    assert tool_here("report", *arguments).refuses(line)


def test_run_without_metrics_is_rejected(load_tool, seeds):
    (seeds[0] / "metrics.csv").unlink()
    tool = load_tool("report")
    with pytest.raises(ConfigError, match=r"seed1: no metrics\.csv"):
        tool.report(tool.parse([str(seeds[0]), "--no-replay"]))


def test_run_without_checkpoint_gets_a_report_without_replay(no_charts, write, seeds, capsys):
    shutil.rmtree(seeds[0] / "checkpoints")
    page, _ = write(seeds[0], options=())
    assert "No replay: " in page.text and "last.pt" in page.text
    assert capsys.readouterr().err.startswith("no replay of ")


def test_report_of_task_without_yaml_omits_defaults(no_charts, write, seeds):
    overrides = seeds[0] / "overrides.yaml"
    overrides.write_text(overrides.read_text() + "- task=Balance\n")
    page, _ = write(seeds[0])
    assert "no yaml found for task Balance" in page.text


def test_replay_of_third_party_envs_is_an_animation(load_tool, seeds, monkeypatch):
    tool = load_tool("report")
    monkeypatch.setattr("gpusim_rl.view.web_scene.html_replay", None)
    monkeypatch.setattr("gpusim_rl.env.VecEnv", type("Ours", (), {}))
    group = reports.Group("", 0, [curves.read_run(seeds[0])], [])
    tool.replay(group, tool.parse(["x", "--steps", "8"]))
    assert group.picture.startswith("data:image/webp;base64,UklGR") and group.replay == ""
    assert re.fullmatch(r"Cartpole, iteration 6, return [\d.]+, seed 1\.", group.caption)


def test_report_embeds_the_replay(no_charts, write, seeds):
    page, text = write(seeds[0], options=("--steps", "6"))
    assert page.loads == [] and page.tags.count("iframe") == 1
    assert "Drag to rotate" in page.text and "__VISER_EMBED_DATA__" in text
    assert len(text) < 2_000_000


def run_of(**columns: list[float]) -> curves.SavedCurves:
    names = {"count": "episode/count", "ended": "episode/ended", "value": "task/success", "mean": "episode/return"}
    table = {names[key]: np.array(values, dtype=float) for key, values in columns.items()}
    length = len(next(iter(table.values())))
    table |= {"iteration": np.arange(1.0, length + 1), "time/elapsed_s": 10.0 * np.arange(1, length + 1)}
    return curves.SavedCurves(RunDir(Path("run")), {"seed": 0}, {"task._target_": "a.b.Ant"}, table)


def goal(threshold: float, stat: str = "") -> Learned:
    return Learned("", None, "", [], threshold, stat)


def test_task_stats_are_means_of_100_episodes():
    nan = float("nan")
    run = run_of(value=[0.0, 1.0, nan, 1.0, 0.5], ended=[60, 60, 5, 60, 30])
    means = reports.recent_means(run, "task/success").tolist()
    assert means == pytest.approx([nan, 0.5, 0.5, 1.0, 0.9], nan_ok=True)
    assert reports.last(run, "task/success") == pytest.approx(0.9)
    assert reports.seconds_to(run, goal(0.95, "success")) == 40.0


def test_threshold_requires_means_of_100_episodes():
    run = run_of(mean=[500.0, 400, 480, 300], count=[3, 100, 100, 100])
    assert reports.seconds_to(run, goal(470.0)) == 30.0 and reports.seconds_to(run, goal(490.0)) is None


def drawn(y: list[float], end: str = "complete", **options: Any) -> str:
    curve = curves.Curve(np.arange(len(y)) + 1.0, np.array(y), end)
    return chart({0: [curve]}, label="a", size=(640, 320), **{"threshold": None, **options})


def test_chart_axes_have_round_numbers_and_units():
    text = drawn([0.0] * 7199 + [470.0], time=True, threshold=450.0)
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    assert labels == ["0", "0.5", "1", "1.5", "2 h", "0", "100", "200", "300", "400", "threshold 450"]


def test_long_curve_is_thinned_and_keeps_its_end():
    text = drawn([(-1.0) ** i * i for i in range(2000)])
    [mean] = re.findall(r'<path d="(M [^"]*)"[^>]*stroke: var\(--c0\)', text)
    points = [point.split() for point in re.split("[ML]", mean)[1:]]
    assert len(points) <= 800 and float(points[-1][0]) == 640 - 14


@pytest.mark.parametrize("y", [[5.0, 5.0], [0.0], [-1e9, 1.0, 2.0, 3.0], [1e-16, -2e-16], [5.0, 5.0 + 1e-15]])
def test_chart_draws_flat_short_and_extreme_curves(y):
    text = drawn(y, "failed")
    assert "nan" not in text and "inf" not in text and "e-1" not in text and 'class="failed"' in text
    assert drawn([]) == ""


@pytest.mark.parametrize(
    ("mean", "best", "below"),
    [([20.0], [float("nan")], "over fewer than 100 episodes"), ([float("nan")], [float("nan")], "no episode yet")],
)
def test_return_of_fewer_than_100_episodes_is_labelled(mean, best, below):
    run = run_of(mean=mean)
    run.columns["episode/best_return"] = np.array(best)
    group = reports.Group("", 0, [run], [reports.Ending("complete", "")])
    assert reports._group(group, None, [], None)["tiles"][0][2] == below


def test_report_replays_the_worst_fall_of_a_stress_test(no_charts, write, seeds):
    pytest.importorskip("viser")
    worst = {
        "label": "push <b>",
        "smallest": 0.66,
        "unit": "m/s",
        "hz": 25.0,
        "qpos": [[0.1 * i, 0.2] for i in range(9)],
    }
    (seeds[0] / "stress.json").write_text(json.dumps({"worst": worst}))
    page, text = write(seeds[0], options=("--steps", "2"))
    assert page.tags.count("iframe") == 2 and "Worst fall: push &lt;b&gt;, 0.66 m/s." in text and "push <b>" not in text
    for damaged in ({"worst": {**worst, "qpos": [[0.1]]}}, {"worst": {**worst, "hz": 0}}, {"worst": {}}, {}):
        (seeds[0] / "stress.json").write_text(json.dumps(damaged))
        page, text = write(seeds[0], options=("--steps", "2"))
        assert page.tags.count("iframe") == 1 and "No replay of the worst fall: " in text
