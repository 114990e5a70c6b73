"""Tests of the console: panel on a terminal, plain lines elsewhere, no error from the display."""

import errno
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import rich.console

from gpusim_rl.run.console import LINE_NUMBERS, Console

ROOT = Path(__file__).parents[2]
# For child processes: this file as a module, without the terminal settings of the test run.
TERMINAL_SETTINGS = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in TERMINAL_SETTINGS} | {
    "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"
}
COMMANDS = ["python tools/play.py runs/Ant/x", "python train.py checkpoint=runs/Ant/x"]
BANNER = [("task", "Ant, 4096 envs"), ("network", "[256, 128, 64] elu")]


def row(iteration: int, **changed: float | None) -> dict[str, int | float | None]:
    return {
        "iteration": iteration,
        "env_steps": iteration * 65536,
        "time/elapsed_s": 100.0 + 2.0 * iteration,
        "episode/return": 1234.5,
        "episode/best_return": 2345.6,
        "episode/length": 321.0,
        "loss/value": 0.0123,
        "policy/kl": 0.00789,
        "policy/learning_rate": 3e-4,
        "policy/std": 0.456,
        "policy/entropy": 7.89,
        "reward/upright": 0.987,
        "reward/effort_of_the_actuators": -0.0654,
        "task/level": 3.21,
        "speed/env_steps_per_s": 35213.3,
        "speed/sim_steps_per_s": 67000.0,
        "time/simulate": 0.51,
        "time/policy": 0.1,
        "time/update": 0.38,
        "time/log": 0.01,
        "system/cpu_percent": 97.3,
        "system/memory_gb": 1.234,
        "system/gpu_percent": 88.0,
        "system/gpu_memory_gb": 4.5,
    } | changed


def show(mode: str, *, total: int = 5, log: Path | None = None, interval_s: float = 0.0) -> Console:
    """Show a whole run on the console."""
    console = Console(mode, total, log, min_interval_s=interval_s)
    console.start(BANNER)
    for iteration in range(1, total + 1):
        if iteration == 3:
            console.info("note [bold]x[/] {y}")
            console.warn("2 envs overflowed")
        console.update(row(iteration))
    console.footer(COMMANDS)
    console.close()
    return console


def test_auto_mode_without_terminal_prints_plain_lines(capsys):
    assert show("auto").mode == "plain"
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert out.splitlines()[:3] == [
        "task     Ant, 4096 envs",
        "network  [256, 128, 64] elu",
        "iteration 1/5 | return 1,234 | length 321 | steps/s 35,213 | KL 0.00789 |"
        " value loss 0.0123 | lr 0.0003 | ETA –",
    ]
    assert "note [bold]x[/] {y}\n" in out and err == "warning: 2 envs overflowed\n"
    assert out.endswith("next:\n" + "".join(f"  {command}\n" for command in COMMANDS))


def test_plain_lines_are_rate_limited_except_first_and_last(capsys):
    show("plain", total=100, interval_s=1000.0)
    assert re.findall(r"^iteration (\d+)/", capsys.readouterr().out, re.MULTILINE) == ["1", "100"]
    console = Console("plain", 100, None, min_interval_s=1000.0)  # a run that stops early
    for iteration in (1, 2, 3):
        console.update(row(iteration))
    for _ in range(2):
        console.close()
    assert re.findall(r"^iteration (\d+)/", capsys.readouterr().out, re.MULTILINE) == ["1", "3"]


def test_missing_values_are_shown_as_dashes(capsys):
    console = Console("plain", 9, None)
    console.start(BANNER)
    console.update({"iteration": 1, **dict.fromkeys(LINE_NUMBERS.values()), "loss/value": 0.5})
    assert capsys.readouterr().out.endswith(
        "iteration 1/9 | return – | length – | steps/s – | KL – | value loss 0.5 | lr – | ETA –\n"
    )


CUSTOM = {"search/earned": 7.0, "search/spread": 0.25, "loss/critic": 9.0, "loss/actor": 3.0}


@pytest.mark.parametrize(
    ("missing", "custom", "shown"),
    [
        (["policy/kl"], {}, "steps/s 35,213 | value loss 0.0123 | lr 0.0003 | ETA –"),
        (
            ["policy/kl", "loss/value", "policy/learning_rate"],
            CUSTOM,
            "steps/s 35,213 | search/earned 7 | search/spread 0.25 | loss/critic 9 | ETA –",
        ),
        ([], CUSTOM, "steps/s 35,213 | KL 0.00789 | value loss 0.0123 | lr 0.0003 | ETA –"),
    ],
)
def test_custom_metrics_replace_missing_standard_metrics(capsys, missing, custom, shown):
    console = Console("plain", 9, None)
    missing = [*missing, "policy/std", "policy/entropy"]
    numbers = {name: value for name, value in row(1).items() if name not in missing} | custom | {"reward/speed": 1.0}
    console.update(numbers)
    assert capsys.readouterr().out == f"iteration 1/9 | return 1,234 | length 321 | {shown}\n"
    text = words(panel_of(numbers))
    for label, name in (("KL", "policy/kl"), ("value loss", "loss/value"), ("learning rate", "policy/learning_rate")):
        assert (f"{label} " in text) is (name not in missing)
    assert ("search/earned 7 " in text) is bool(custom) and "reward/speed 1 " in text


def words(screen: list[str]) -> str:
    """Return the text of a panel as one line."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", " ".join(screen))


@pytest.mark.parametrize(("first", "slow_start_s"), [(1, 60.0), (41, 300.0)])
def test_eta_ignores_warm_up(capsys, first, slow_start_s):
    console = Console("plain", 100, None, min_interval_s=0.0)
    console.start(BANNER)
    for iteration in range(first, first + 5):
        elapsed = slow_start_s + 3.0 * (iteration - first)
        console.update({"iteration": iteration, "time/elapsed_s": elapsed})
    etas = re.findall(r"ETA (.*)", capsys.readouterr().out)
    left = 3 * (100 - first - 4)
    assert etas[:2] == ["–", "–"] and etas[4] == f"{left // 60} min {left % 60:02d} s"


def test_json_mode_prints_every_row_as_one_object(capsys):
    show("json", interval_s=1000.0)
    out, err = capsys.readouterr()
    events = [json.loads(line, parse_constant=lambda word: pytest.fail(word)) for line in out.splitlines()]
    assert [event["event"] for event in events] == (
        ["banner", "row", "row", "info", "warning", "row", "row", "row", "footer"]
    )
    assert events[0]["task"] == "Ant, 4096 envs" and {**row(1), "event": "row"} == events[1]
    assert events[-1]["commands"] == COMMANDS and err == ""


def test_json_mode_writes_non_finite_numbers_as_null(capsys):
    console = Console("json", 9, None)
    console.update({"iteration": 1, "a": float("nan"), "b": float("inf"), "c": None})
    assert json.loads(capsys.readouterr().out) == ({"event": "row", "iteration": 1, "a": None, "b": None, "c": None})


def test_quiet_mode_shows_only_warnings(capsys):
    show("quiet")
    out, err = capsys.readouterr()
    assert out == "" and err == "warning: 2 envs overflowed\n"


@pytest.mark.parametrize("mode", ["plain", "rich", "json", "quiet"])
def test_log_file_has_all_lines_as_plain_text_and_is_appended(tmp_path, mode, capsys):
    log = tmp_path / "train.log"
    show(mode, log=log)
    show(mode, log=log)
    lines = log.read_text().splitlines()
    texts = [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", "", line) for line in lines]
    assert texts[: len(texts) // 2] == texts[len(texts) // 2 :] and "\x1b" not in log.read_text()
    for text in ("task     Ant, 4096 envs", "note [bold]x[/] {y}", "warning: 2 envs overflowed"):
        assert text in texts
    assert sum(text.startswith("iteration") for text in texts) == 10 and f"  {COMMANDS[1]}" in texts


def panel_of(*rows: dict, width: int = 100, height: int = 40, progress: str = "") -> list[str]:
    """Return the lines of the panel after these rows."""
    console = Console("rich", 100, None)
    console._rich = rich.console.Console(file=io.StringIO(), width=width + 2, height=height)
    console.start([], "Ant · 2026-01-31_12-00-00")
    for numbers in rows:
        console.update(numbers)
    console._progress = progress
    with console._rich.capture() as shown:
        console._rich.print(console._panel())
    return shown.get().splitlines()


def test_unwritable_log_file_is_reported_once(tmp_path, capsys):
    show("plain", log=tmp_path / "missing" / "train.log")
    err = capsys.readouterr().err
    assert err.count("train.log (") == 1 and "2 envs overflowed" in err


FIELDS = (
    *("Ant · 2026-01-31_12-00-00", "━", "iteration 5/100", "ETA 3 min 10 s", "steps/s 35,213", "KL 0.00789"),
    *("return (last 100 episodes) 1,234", "best (middle 90 of 100) 2,346", "episode length 321", "value loss 0.0123"),
    *("simulator steps/s 67,000", "learning rate 0.0003", "env steps 327,680", "action std 0.456", "entropy 7.89"),
    *("reward/upright 0.987", "task/level 3.21", "CPU 97 %, memory 1.23 GB", "GPU 88 %, memory 4.5 GB", "elapsed"),
    *("simulate 51 %", "policy 10 %", "update 38 %", "log 1 %"),
)


@pytest.mark.parametrize("width", [40, 60, 78, 100])
def test_panel_shows_values_in_full_at_common_widths(width):
    lines = panel_of(*map(row, range(1, 6)), width=width)
    assert {len(line) for line in lines} == {width}
    shown = words(lines)
    for field in FIELDS:
        value = field if width > 40 else field.split()[-1]  # labels are wrapped there
        assert value in shown, field
    text = words(panel_of(row(1, **{"system/gpu_memory_gb": None}), width=width))
    assert "GPU" not in text and "CPU 97 %" in text, "no GPU"


def test_panel_aligns_numbers_and_sorts_reward_terms_by_size():
    terms = {"reward/upright": 0.1, "reward/effort_of_the_actuators": -2.0, "reward/alive": 0.5, "reward/off": None}
    lines = panel_of(row(1) | terms)
    names = re.findall(r"(?:task|reward)/(\w+)", " ".join(lines))
    assert names == ["level", "effort_of_the_actuators", "alive", "upright", "off"]
    at = {line.index(value) for line in lines for value in ("321 ", "3.21 ", "0.0123 ", "0.5 ") if f" {value}" in line}
    assert len(at) == 1
    [minus] = [line for line in panel_of(row(1) | terms, width=60) if "-2 " in line]
    assert minus[minus.index("2 ") - 1] == "-" and minus.index("2 ") == 34, "minus sign left of the digit column"
    assert [number for number, line in enumerate(lines) if not line.strip("│ ")] == [8, 12], (
        "blank lines between groups"
    )


def test_short_terminal_counts_omitted_values():
    lines = panel_of(row(1) | {f"reward/term_{i}": 0.5 + i for i in range(40)}, width=78, height=24)
    assert 20 <= len(lines) <= 23 and lines[-1].startswith("╰")
    left_out = re.search(r"and (\d+) more in metrics.csv", words(lines))
    assert left_out is not None
    assert len(re.findall(r"reward/|task/", words(lines))) == 43 - int(left_out.group(1))


def test_panel_plots_return_with_its_range():
    [line] = [text for text in panel_of(*(row(i, **{"episode/return": 2.0 * i}) for i in range(1, 81))) if "▁" in text]
    bars = re.sub("[^▁▂▃▄▅▆▇█]", "", line)
    assert bars == "".join(sorted(bars)) and bars[0] == "▁" and bars[-1] == "█" and "  2 to 160 " in line
    rows = [row(i, **{"episode/return": None if i < 20 else -5.0}) for i in range(1, 81)]
    assert "  -5 to -5 since iteration 20" in " ".join(panel_of(*rows)), "constant return"
    assert "▁" not in " ".join(panel_of(row(1), row(2))), "no curve from two points"


def test_panel_escapes_control_characters_in_names():
    lines = panel_of({"iteration": 1, f"task/{HOSTILE}": 1.0, f"loss/{HOSTILE}": 2.0}, progress=f"at {HOSTILE}")
    text = "\n".join(lines)
    assert all(f"{place}{SAFE}" in text for place in ("task/", "loss/", "at ")) and f"at {SAFE} ─" in lines[-1]
    assert not set("\r\x1b\x9b\u2028") & set(text)


def in_terminal(
    script: str,
    columns: int = 110,
    *,
    lines: int = 40,
    interrupt_at: str = "",
    close_at: str = "",
    code: int = 0,
    **environment: str,
) -> str:
    """Return the output of a Python script in a new terminal.

    Types Ctrl-C once the terminal shows `interrupt_at`; closes the terminal once it shows `close_at`.
    """
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=ENVIRONMENT | {"TERM": "xterm-256color"} | environment,
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
    )
    os.close(secondary)
    output = b""
    while True:
        try:
            chunk = os.read(primary, 65536)
        except OSError as error:
            assert error.errno == errno.EIO  # Linux: the other end is closed
            break
        if not chunk:
            break
        output += chunk
        if interrupt_at and interrupt_at.encode() in output:
            interrupt_at = ""
            os.write(primary, b"\x03")
        if close_at and close_at.encode() in output:
            break
    os.close(primary)
    assert process.wait() == code, output.decode(errors="replace")
    return output.decode(errors="replace").replace("\r\n", "\n")


@pytest.mark.parametrize("mode", ["plain", "json", "quiet", "rich"])
def test_notice_is_printed_after_the_current_line(mode, capsys):
    console = Console(mode, 9, None)
    with console._whole():
        console.notice("stopping")
        assert capsys.readouterr() == ("", "")
    out, err = capsys.readouterr()
    if mode == "json":
        assert json.loads(out) == {"event": "notice", "text": "stopping"}
    else:
        assert (out + err).strip() == "stopping"


@pytest.mark.parametrize("mode", ["rich", "plain", "json", "quiet"])
def test_long_iteration_shows_progress(mode, monkeypatch, capsys):
    times = iter([0.0, 0.0, *(0.5 * tick for tick in range(100))])
    monkeypatch.setattr("gpusim_rl.run.console.time.monotonic", lambda: next(times))
    console = Console(mode, 9, None)
    console.start([])
    shown = []
    for step in range(1, 61):
        console.progress(f"iteration 1: control step {step}/60")
        shown.append(console._progress)
    out = capsys.readouterr().out
    if mode == "rich":
        assert sorted({shown.index(text) for text in shown}) == [0, *range(4, 60, 4)]
        assert "control step 1/60" not in out
        console.update(row(1))
        assert console._progress == ""
    else:
        steps = re.findall(r"iteration 1: control step (\d+)/60", out)
        assert steps == ([] if mode == "quiet" else ["21", "41"])
    console.close()


SHOW = "import test_console as t; t.show('auto')"
# Escapes of rich's live display: colour and style, erase line, cursor up, hide and show the cursor
ALLOWED = re.compile(r"\x1b\[(?:[0-9;]*m|2K|1A|\?25[lh])$")


def test_terminal_redraws_panel_below_printed_text():
    script = (
        "import sys, test_console as t; c = t.Console('auto', 9, None); c.start([*t.BANNER, t.LONG]);"
        "c.update(t.row(1)); print('from stdout'); print('from stderr', file=sys.stderr); c.warn('a warning');"
        "c.update(t.row(9)); c.footer(t.COMMANDS)"
    )
    output = in_terminal(script, 60)
    assert all(map(ALLOWED.match, re.findall(r"\x1b(?:\[[0-9;?]*[A-Za-z])?", output)))
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l"), "cursor is shown again"
    screen = render(output, 60)
    panel = next(i for i, line in enumerate(screen) if line.startswith("╭"))
    assert (
        screen[2:panel]
        == [
            f"run      {LONG[1][:51]}",  # a path stays whole so that it can be copied
            LONG[1][51:60],
            "         and text that is wrapped at words",
            "from stdout",
            "from stderr",
            "warning: a warning",
        ]
    )
    assert sum(line.startswith("╭") for line in screen) == 1 and "iteration 9/9" in words(screen[panel:])
    assert screen[-3:] == ["next:", *(f"  {command}" for command in COMMANDS)]


LONG = ("run", f"{60 * 'x'} and text that is wrapped at words")


@pytest.mark.parametrize(("variables", "escapes"), [({"NO_COLOR": "1"}, True), ({"TERM": "dumb"}, False)])
def test_no_color_and_dumb_terminals_are_respected(variables, escapes):
    output = in_terminal(SHOW, **variables)
    colors = re.findall(r"\x1b\[(?:[0-9;]*;)?(?:3[0-9]|4[0-9]|9[0-7]|10[0-7])[0-9;]*m", output)
    assert not colors and ("\x1b" in output) == escapes == ("╭" in output)
    assert escapes or "iteration 5/5 |" in output


def training(folder: Path) -> str:
    """Return a script that trains until it is stopped."""
    small = ["num_envs=8", "ppo.horizon=8", "ppo.epochs=1", "ppo.network.hidden=[16]", "max_iterations=100000"]
    argv = [str(ROOT / "train.py"), *small, f"log.dir={folder}"]
    return f"import sys, runpy; sys.argv = {argv}; runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.mark.parametrize("closed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ctrl_c_and_closed_terminal_save_a_checkpoint(tmp_path, closed):
    """The panel stays intact and shows the notice."""
    from gpusim_rl.run import checkpoint

    how, code = ({"close_at": "reward/upright"}, 129) if closed else ({"interrupt_at": "reward/upright"}, 130)
    output = in_terminal(training(tmp_path), 60, lines=30, code=code, PYTHONPATH=str(ROOT), **how)
    (run,) = tmp_path.glob("Cartpole/2*")
    saved = checkpoint.load(run / "checkpoints" / "last.pt")["iteration"]
    assert len((run / "metrics.csv").read_text().splitlines()) == 1 + saved
    assert "second signal" in (run / "train.log").read_text()
    if not closed:
        screen = render(output, 60)
        assert "secondsignal" in "".join(screen).replace(" ", ""), "may be wrapped"
        panel = [number for number, line in enumerate(screen) if line[0] in "╭│╰"]
        assert panel == list(range(panel[0], panel[-1] + 1)) and "^C" not in "".join(screen[panel[0] :])
        assert "".join(screen[number][0] for number in panel) == "╭" + "│" * (len(panel) - 2) + "╰"
        assert f"iteration {saved:,}/100000" in words(screen)


def render(output: str, columns: int = 110) -> list[str]:
    """Return the screen of a wrapping terminal that knows line feed, erase line and cursor up."""
    lines, y, x = [""], 0, 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\n|\r|[^\x1b]", output):
        if piece == "\n":
            y, x = y + 1, 0
        elif piece == "\r":
            x = 0
        elif piece == "\x1b[2K":
            lines[y] = ""
        elif piece == "\x1b[1A":
            y = max(0, y - 1)
        elif not piece.startswith("\x1b"):
            if x == columns:  # a terminal wraps at the next character, not in the last column
                y, x = y + 1, 0
            lines += [""] * (y + 1 - len(lines))
            lines[y] = lines[y][:x].ljust(x) + piece + lines[y][x + 1 :]
            x += 1
        lines += [""] * (y + 1 - len(lines))
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize("mode", ["plain", pytest.param("rich", marks=pytest.mark.slow)])
def test_broken_pipe_does_not_end_the_run(mode):
    script = (
        "import sys, time, test_console as t\n"
        "console = t.Console(sys.argv[1], 50, None, min_interval_s=0.0)\n"
        "console.start(t.BANNER)\n"
        "for iteration in range(1, 51):\n"
        "    console.update(t.row(iteration))\n"
        "    console.info('text')\n"
        "    time.sleep(0.02)\n"
        "console.footer(t.COMMANDS)\n"
        "console.close()\n"
        "sys.stderr.write('reached the end')\n"
    )
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", script, mode],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write_end)
    assert os.read(read_end, 100)
    os.close(read_end)  # like `python train.py | head`
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert err == "reached the end"


@pytest.mark.parametrize("mode", ["plain", "rich"])
@pytest.mark.parametrize("stream", ["closed", "none"])
def test_closed_or_missing_stdout_is_ignored(monkeypatch, tmp_path, mode, stream):
    closed = io.StringIO()
    closed.close()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, closed if stream == "closed" else None)
    show(mode, log=tmp_path / "train.log")
    assert COMMANDS[0] in (tmp_path / "train.log").read_text()


def test_unencodable_characters_are_replaced(monkeypatch):
    screen = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, encoding="ascii"))
    show("plain")
    assert b"ETA ?" in screen.getvalue()


HOSTILE = "a\nb\r\x1b[2J\x9b\u2028[red]"
SAFE = "a\\nb\\r\\x1b[2J\\x9b\\u2028[red]"


@pytest.mark.parametrize("mode", ["plain", "rich"])
def test_control_characters_are_escaped_into_one_line(mode, tmp_path, capsys):
    log = tmp_path / "train.log"
    console = Console(mode, 9, log)
    console.start([("task", HOSTILE)])
    console.info(f"info {HOSTILE}")
    console.notice(f"notice {HOSTILE}")
    console.warn(f"warn {HOSTILE}")
    console.note(f"note {HOSTILE}")
    console.result({f"task/{HOSTILE}": 1.0})
    console.update(row(1, **{f"loss/{HOSTILE}": 2.0}))
    console.footer([f"footer {HOSTILE}"])
    text = "".join(capsys.readouterr())
    assert f"info {SAFE}\n" in text and f"notice {SAFE}\n" in text and "\nb" not in text
    assert not set("\r\x1b\x9b\u2028") & set(text)
    lines = log.read_text().splitlines()
    assert all(re.match(r"[0-9]{4}-[0-9]{2}-[0-9]{2} ", line) for line in lines)
    for name in ("info ", "notice ", "warn ", "note ", "task/", "footer "):
        assert any(f"{name}{SAFE}" in line for line in lines), name
