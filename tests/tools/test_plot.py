"""Tests of the command `plot`: seeds share one curve, other settings get their own."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from gpusim_rl.errors import ConfigError
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.view import charts, curves

pytest_plugins = ["helpers.tool_runs"]


@pytest.fixture
def plot(load_tool):
    return load_tool("plot")


def folders(runs_folder, task: str = "Cartpole") -> list[str]:
    return [str(path.relative_to(runs_folder)) for path in sorted((runs_folder / "runs" / task).iterdir())]


def test_runs_of_a_task_share_one_figure(tool_here, runs_folder, tmp_path):
    arguments = folders(runs_folder)
    assert arguments[-1].endswith("latest")
    for suffix, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        out = tmp_path / f"curves{suffix}"
        assert tool_here("plot", *arguments, "--out", out).stdout == f"{out}\n"
        assert out.read_bytes().startswith(magic)


def test_figure_of_one_run_is_saved_in_its_folder(tool_here, runs_folder):
    done = tool_here("plot", "Cartpole", "-cd", "my_cfg", "--key", "policy/kl", "--x", "time")
    assert done.stdout.startswith("runs/Cartpole/2") and done.stdout.endswith("/policy_kl.png\n")
    assert (runs_folder / done.stdout.strip()).stat().st_size > 5000


def test_only_the_default_figure_is_replaced_without_overwrite(tool_here, tmp_path):
    first, second = (tool_here("plot", "Cartpole").stdout for _ in range(2))
    assert first == second
    out = tmp_path / "mine.png"
    out.write_text("mine")
    assert tool_here("plot", "Cartpole", "--out", out).returncode == 2 and out.read_text() == "mine"
    tool_here("plot", "Cartpole", "--out", out, "--overwrite")
    assert out.read_bytes().startswith(b"\x89PNG")


def test_folders_without_metrics_are_skipped(tool_here, runs_folder, tmp_path):
    ant = folders(runs_folder, "Ant")[0]  # too short for an episode to end
    done = tool_here("plot", *folders(runs_folder), ant, "runs", "--out", tmp_path / "x.png")
    lines = done.stderr.splitlines()
    assert lines[0] == "skipped runs: no metrics.csv"
    assert lines[1].startswith(f"skipped {ant}/metrics.csv: episode/return ")


@pytest.mark.parametrize("junk", [b"\0", b'"', b"\xff", b",", b"9" * 200_000, b"x"])
def test_damaged_metrics_are_drawn_up_to_the_damage(load_tool, runs_folder, tmp_path, capsys, junk):
    run = tmp_path / "damaged"
    shutil.copytree(runs_folder / "runs" / "Cartpole" / "latest", run)
    lines = (run / "metrics.csv").read_bytes().splitlines(keepends=True)
    (run / "metrics.csv").write_bytes(b"".join([*lines[:3], junk + lines[3], *lines[4:]]))
    [drawn] = load_tool("plot").read_runs([run], "policy/kl", "env_steps")
    assert len(drawn.columns["iteration"]) == 2 and "line 4" in capsys.readouterr().err
    (run / "metrics.csv").write_bytes(junk + b"".join(lines))
    with pytest.raises(ConfigError):
        load_tool("plot").read_runs([run], "policy/kl", "env_steps")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["Nothing"], "no run 'Nothing': "),
        (["Cartpole", "--key", "episode/retrn"], "Did you mean 'episode/return'?"),
        (["Ant"], "episode/return has no values"),
        (["Cartpole", "--out", "new/x.png"], "--out new/x.png: "),
        (["Cartpole", "--out", "x.bmp"], "got 'x.bmp'"),
    ],
)
def test_bad_input_is_rejected_in_one_line(tool_here, arguments, line):
    assert tool_here("plot", *arguments).refuses(line)


VIEW = {"plot": "matplotlib", "report": "matplotlib", "snapshot": "PIL.Image", "record": "imageio_ffmpeg"}
EXPORT = ("onnx", "onnxscript", "onnxruntime")
EXTRAS = [(words, module, "view") for words, module in (VIEW | {"record --html": "viser"}).items()]


@pytest.mark.parametrize(("words", "module", "extra"), [*EXTRAS, *(("export", name, "export") for name in EXPORT)])
def test_missing_extra_is_reported_in_one_line(tool_here, monkeypatch, words, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    name, *flags = words.split()
    assert tool_here(name, "Cartpole", *flags).refuses(
        f"{words}: {module} is missing. Try pip install 'gpusim-rl[{extra}]'\n"
    )


def test_curves_are_named_by_differing_settings():
    ant = {"task._target_": "a.b.Ant", "ppo.clip": 0.2, "task.up_weight": 1}
    assert curves.titles([ant]) == ["Ant"]
    other = {**ant, "ppo.clip": 0.1, "task.up_weight": 2}
    hopper = {"task._target_": "a.b.Hopper", "ppo.clip": 0.3}
    names = ["Ant ppo.clip=0.2 up_weight=1", "Ant ppo.clip=0.1 up_weight=2", "Hopper"]
    assert curves.titles([ant, other, hopper]) == names


def test_curve_names_put_algorithm_before_settings():
    ppo = {"task._target_": "a.b.Ant", "algo.name": "ppo", "algo._target_": "x.PPO", "num_envs": 8, "ppo.clip": 0.2}
    search = {"task._target_": "a.b.Ant", "algo.name": "search", "algo._target_": "y.S", "num_envs": 4}
    search["search.step"] = 1
    hopper = {**ppo, "task._target_": "a.b.Hopper"}
    assert curves.titles([ppo, search, hopper]) == ["Ant ppo num_envs=8", "Ant search num_envs=4", "Hopper"]
    names = ["Ant ppo ppo.clip=0.2", "Ant ppo ppo.clip=0.1", "Ant search"]
    assert curves.titles([ppo, {**ppo, "ppo.clip": 0.1}, {**search, "num_envs": 8}]) == names


def test_settings_of_unused_algorithms_are_ignored(runs_folder, tmp_path):
    run = runs_folder / folders(runs_folder)[0]
    assert any(key.startswith("ppo.") for key in curves.read_run(run).settings)
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    file = tmp_path / "run" / "config.yaml"
    file.write_text(re.sub(r"(?m)^( +)name: ppo$", r"\1name: search", file.read_text()))
    other = curves.read_run(tmp_path / "run").settings
    assert other["algo.name"] == "search" and not any(key.startswith("ppo.") for key in other)


def saved(x: list[float], y: list[float], **settings: object) -> curves.SavedCurves:
    columns = {"iteration": np.array(x), "env_steps": np.array(x), "episode/return": np.array(y)}
    return curves.SavedCurves(RunDir(Path("run")), {"seed": 0}, {"task._target_": "a.b.Ant", **settings}, columns)


@pytest.mark.filterwarnings("error")
def test_legend_is_below_the_axes(plot, tmp_path):
    runs = [saved([0, 1], [0, 1], **{"num_envs": i, "ppo.network.hidden": [i] * 40}) for i in range(20)]
    figure = plot.draw([[run] for run in runs], "episode/return", "env_steps")
    figure.savefig(tmp_path / "x.png")
    axes, legend = figure.axes[0].get_window_extent(), figure.legends[0].get_window_extent()
    assert legend.y1 <= axes.y0 and legend.y0 >= 0 and legend.x0 >= 0 and legend.x1 <= figure.bbox.x1
    assert axes.height > 0.6 * 5 * figure.dpi


def test_runs_are_grouped_by_settings_except_seed(runs_folder):
    names = [str(runs_folder / name) for name in folders(runs_folder)]
    runs = [curves.read_run(folder) for folder in curves.run_folders(names)]
    assert sorted([run.seed for run in group] for group in curves.grouped(runs)) == [[1, 2], [3]]


def returns(*runs: curves.SavedCurves) -> list[curves.Curve]:
    return [run.curve("episode/return", "env_steps") for run in runs]


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_mean_curve_ends_with_the_shortest_run(plot):
    """Otherwise the mean would jump from 2.5 to 20 where the bad run ends."""
    group = [saved([0, 10], [0, 20]), saved([2, 5], [-2, -5])]
    x, mean, std = curves.mean_and_std(returns(*group))
    assert (x[0], x[-1]) == (2, 5) and (mean[0], mean[-1], std[-1]) == (1, 2.5, 7.5)
    figure = plot.draw([group], "episode/return", "env_steps")
    assert [line.get_xdata()[-1] for line in figure.axes[0].lines] == [5, 10, 5, 5], "mean, both runs, end of the mean"
    assert [line.get_linewidth() < 1 for line in figure.axes[0].lines] == [False, True, True, False]
    [entry] = legend(figure)
    assert entry.startswith("2 runs, 2.5 ± 7.5 at 5 steps, ")


def test_runs_without_overlap_have_no_mean(plot):
    one, other = saved([0, 1], [3, 4]), saved([2, 3], [3, 4])
    x, mean, std = curves.mean_and_std(returns(one))
    assert (x.tolist(), mean.tolist(), std.tolist()) == ([0, 1], [3, 4], [0, 0])
    x, mean, _ = curves.mean_and_std(returns(one, other))
    assert len(x) == len(mean) == 0
    assert "no mean" in legend(plot.draw([[one, other]], "episode/return", "env_steps"))[0]
    one_row = plot.draw([[saved([5], [1]), saved([5], [3])]], "episode/return", "env_steps")
    assert legend(one_row) == ["2 runs, 2 ± 1 at 5 steps"]


@pytest.mark.parametrize(
    ("end", "shown", "last"),
    [
        (2_000_000, {"500 k", "1 M", "1.5 M"}, "2 M"),
        (120_000, {"20 k", "80 k", "100 k"}, "120 k"),
        (700, {"100", "600"}, "700"),
    ],
)
def test_numbers_are_shown_with_k_and_m_suffixes(plot, end, shown, last):
    figure = plot.draw([[saved([0, end], [0, 10]), saved([0, end], [2, 12])]], "episode/return", "env_steps")
    assert legend(figure) == [f"2 runs, 11 ± 1 at {last} steps"]
    figure.canvas.draw()
    ticks = {text.get_text() for text in figure.axes[0].get_xticklabels()}
    assert shown <= ticks and not any("e" in text for text in ticks)


def test_figure_has_title_labels_and_threshold(plot):
    cartpole = {"task._target_": "gpusim_rl.tasks.cartpole.Cartpole"}
    run = saved([0, 10], [0, 500], **cartpole)
    figure = plot.draw([[run]], "episode/return", "env_steps")
    [axes] = figure.axes
    assert axes.get_title() == "Cartpole" and axes.get_xlabel().startswith("env steps")
    assert axes.get_ylabel().startswith("return, mean of the last 100 ")
    run_entry, threshold = legend(figure)
    assert run_entry == "1 run, 500 at 10 steps" and threshold.startswith("threshold 470: ")
    assert axes.lines[-1].get_ydata() == [470, 470]
    run.columns["policy/kl"] = run.columns["episode/return"]
    assert len(legend(plot.draw([[run]], "policy/kl", "env_steps"))) == 1
    far = plot.draw([[saved([0, 10], [0, 1], **cartpole)]], "episode/return", "env_steps")
    assert "outside" in legend(far)[1] and far.axes[0].get_ylim()[1] < 2
    two = plot.draw([[run], [saved([0, 10], [0, 400])]], "episode/return", "env_steps")
    assert two.axes[0].get_title() == "Cartpole, Ant"
    assert legend(two) == ["Cartpole, 1 run, 500 at 10 steps", "Ant, 1 run, 400 at 10 steps"]


def test_threshold_applies_to_the_stat_and_variant_of_the_task(plot):
    def trifinger(difficulty: int) -> curves.SavedCurves:
        settings = {"task._target_": "gpusim_rl.tasks.trifinger.Trifinger", "task.difficulty": difficulty}
        run = saved([0, 10], [0, 1], **settings)
        run.columns["task/success"] = run.columns["episode/return"]
        return run

    figure = plot.draw([[trifinger(1)]], "task/success", "env_steps")
    assert legend(figure)[1].startswith("threshold 0.6: ") and figure.axes[0].get_ylabel() == "success"
    assert legend(plot.draw([[trifinger(1)]], "episode/return", "env_steps"))[1:] == []
    assert legend(plot.draw([[trifinger(4)]], "task/success", "env_steps"))[1:] == []


def test_time_axis_uses_a_fitting_unit(plot):
    run = saved([0, 10], [0, 5])
    run.columns["time/elapsed_s"] = np.array([0.0, 5400.0])
    figure = plot.draw([[run]], "episode/return", "time")
    assert figure.axes[0].get_xlabel() == "training time [min]"
    assert legend(figure) == ["1 run, 5 at 90 min"]


@pytest.mark.parametrize(("name", "usetex"), [("$a$ and $b$", False), ("_private", True), ("100 % #1 ^2 & {x}", True)])
def test_names_are_not_parsed_as_math_or_tex(plot, tmp_path, name, usetex):
    """Without TeX installed, parsed names would raise."""
    groups = [[saved([0, 1], [0, 1], **{"task._target_": f"a.b.{name}"})], [saved([0, 1], [0, 1])]]
    groups[0][0].columns["task/$x$"] = groups[1][0].columns["task/$x$"] = np.array([1.0, 2.0])
    with matplotlib.rc_context({"text.usetex": usetex}):
        figure = plot.draw(groups, "task/$x$", "env_steps")
        with (tmp_path / "x.png").open("wb") as file:
            charts.save(figure, file, "png")
    [first, second] = legend(figure)
    assert first.strip().startswith(f"{name}, ") and second.startswith("Ant, ")
    texts = [figure.axes[0].title, figure.axes[0].yaxis.label, *figure.legends[0].get_texts()]
    assert not any(text.get_parse_math() or text.get_usetex() for text in texts)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([1e-16, -2e-16, 3e-17], "0"),
        ([5.0, 5.0 + 1e-15, 5.0], "5"),
        ([500.0, 500.00003, 499.99997], "500"),
        ([0.0, 0.0, 0.0], "0"),
        ([-0.2, 0.1, 0.2], "0"),
    ],
)
def test_rounding_errors_do_not_scale_the_axis(plot, values, labels):
    figure = plot.draw([[saved([0, 5, 10], values)]], "episode/return", "env_steps")
    figure.canvas.draw()
    ticks = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels in ticks and len(ticks) == len(set(ticks)) and not any("e-" in text for text in ticks)


def test_groups_are_compared_at_common_steps(plot):
    groups = [[saved([0, 100], [0, 10], num_envs=1)], [saved([0, 400], [0, 80], num_envs=4)]]
    first, second = legend(plot.draw(groups, "episode/return", "env_steps"))
    assert first.endswith("10 at 100 steps") and "80 at 400 steps, 20 at 100 steps" in second
