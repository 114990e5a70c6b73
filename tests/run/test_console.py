"""What a user sees: a panel on a terminal, plain lines elsewhere, never an error of the display."""

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
# For child processes: this file as a module, and no wishes of the terminal that runs the tests.
WISHES = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in WISHES} | {
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
    """A whole run on the console."""
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


# Plain


def test_without_a_terminal_auto_is_plain_lines_without_escapes(capsys):
    assert show("auto").mode == "plain"
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert out.splitlines()[:3] == [
        "task     Ant, 4096 envs",
        "network  [256, 128, 64] elu",
        "iteration 1/5 | return 1,234 | length 321 | steps/s 35,213 | KL 0.00789 |"
        " value loss 0.0123 | lr 0.0003 | ETA –",
    ]
    assert "note [bold]x[/] {y}\n" in out
    assert err == "warning: 2 envs overflowed\n"
    assert out.endswith("next:\n" + "".join(f"  {command}\n" for command in COMMANDS))


def test_plain_lines_keep_their_distance_but_show_first_and_last(capsys):
    show("plain", total=100, interval_s=1000.0)
    out = capsys.readouterr().out
    assert re.findall(r"^iteration (\d+)/", out, re.MULTILINE) == ["1", "100"]


def test_the_last_line_is_shown_when_a_run_stops_early(capsys):
    console = Console("plain", 100, None, min_interval_s=1000.0)
    console.start(BANNER)
    for iteration in (1, 2, 3):
        console.update(row(iteration))
    console.close()
    console.close()
    out = capsys.readouterr().out
    assert re.findall(r"^iteration (\d+)/", out, re.MULTILINE) == ["1", "3"]


def test_what_is_not_known_is_a_dash(capsys):
    console = Console("plain", 9, None)
    console.start(BANNER)
    console.update({"iteration": 1, **dict.fromkeys(LINE_NUMBERS.values()), "loss/value": 0.5})
    assert capsys.readouterr().out.endswith(
        "iteration 1/9 | return – | length – | steps/s – | KL – | value loss 0.5 | lr – | ETA –\n"
    )


OWN = {"search/earned": 7.0, "search/spread": 0.25, "loss/critic": 9.0, "loss/actor": 3.0}


@pytest.mark.parametrize(
    ("gone", "own", "shown"),
    [
        (["policy/kl"], {}, "steps/s 35,213 | value loss 0.0123 | lr 0.0003 | ETA –"),
        (["policy/kl", "loss/value"], OWN, "steps/s 35,213 | lr 0.0003 | search/earned 7 | search/spread 0.25 | ETA –"),
        (
            ["policy/kl", "loss/value", "policy/learning_rate"],
            OWN,
            "steps/s 35,213 | search/earned 7 | search/spread 0.25 | loss/critic 9 | ETA –",
        ),
        ([], OWN, "steps/s 35,213 | KL 0.00789 | value loss 0.0123 | lr 0.0003 | ETA –"),
    ],
)
def test_an_algorithm_shows_its_own_numbers_in_place_of_those_it_does_not_have(capsys, gone, own, shown):
    console = Console("plain", 9, None)
    gone = [*gone, "policy/std", "policy/entropy"]
    numbers = {name: value for name, value in row(1).items() if name not in gone} | own | {"reward/speed": 1.0}
    console.update(numbers)
    assert capsys.readouterr().out == f"iteration 1/9 | return 1,234 | length 321 | {shown}\n"
    text = rich_text(console._panel())
    for label, name in (("KL", "policy/kl"), ("value loss", "loss/value"), ("learning rate", "policy/learning_rate")):
        assert (f"{label} " in text) is (name not in gone)
    assert ("search/earned 7 " in text) is bool(own) and "reward/speed 1 " in text


def rich_text(panel) -> str:
    """A panel as one line."""
    text = io.StringIO()
    rich.console.Console(file=text, width=100).print(panel)
    return words([text.getvalue()])


def words(screen: list[str]) -> str:
    """What is in a panel, as one line."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", " ".join(screen))


@pytest.mark.parametrize(("first", "slow_start_s"), [(1, 60.0), (41, 300.0)])
def test_eta_does_not_count_the_warm_up(capsys, first, slow_start_s):
    console = Console("plain", 100, None, min_interval_s=0.0)
    console.start(BANNER)
    for iteration in range(first, first + 5):
        elapsed = slow_start_s + 3.0 * (iteration - first)
        console.update({"iteration": iteration, "time/elapsed_s": elapsed})
    etas = re.findall(r"ETA (.*)", capsys.readouterr().out)
    left = 3 * (100 - first - 4)
    assert etas[:2] == ["–", "–"]
    assert etas[4] == f"{left // 60} min {left % 60:02d} s"


# Json and quiet


def test_json_mode_is_an_object_per_line_with_every_row(capsys):
    show("json", interval_s=1000.0)
    out, err = capsys.readouterr()
    events = [json.loads(line, parse_constant=lambda word: pytest.fail(word)) for line in out.splitlines()]
    assert [event["event"] for event in events] == (
        ["banner", "row", "row", "info", "warning", "row", "row", "row", "footer"]
    )
    assert events[0]["task"] == "Ant, 4096 envs"
    assert {**row(1), "event": "row"} == events[1]
    assert events[-1]["commands"] == COMMANDS
    assert err == ""


def test_json_has_null_for_what_json_cannot_hold(capsys):
    console = Console("json", 9, None)
    console.update({"iteration": 1, "a": float("nan"), "b": float("inf"), "c": None})
    assert json.loads(capsys.readouterr().out) == ({"event": "row", "iteration": 1, "a": None, "b": None, "c": None})


def test_quiet_shows_warnings_only(capsys):
    show("quiet")
    out, err = capsys.readouterr()
    assert out == "" and err == "warning: 2 envs overflowed\n"


# train.log


@pytest.mark.parametrize("mode", ["plain", "rich", "json", "quiet"])
def test_log_has_everything_as_plain_text_and_is_continued(tmp_path, mode, capsys):
    log = tmp_path / "train.log"
    show(mode, log=log)
    show(mode, log=log)
    lines = log.read_text().splitlines()
    texts = [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", "", line) for line in lines]
    assert texts[: len(texts) // 2] == texts[len(texts) // 2 :]
    assert "\x1b" not in log.read_text()
    for text in ("task     Ant, 4096 envs", "note [bold]x[/] {y}", "warning: 2 envs overflowed"):
        assert text in texts
    assert sum(text.startswith("iteration") for text in texts) == 10
    assert f"  {COMMANDS[1]}" in texts


def test_a_log_that_cannot_be_written_is_reported_once(tmp_path, capsys):
    show("plain", log=tmp_path / "missing" / "train.log")
    err = capsys.readouterr().err
    assert err.count("train.log cannot be written") == 1
    assert "2 envs overflowed" in err


# A terminal: a real one, by pty


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
    """What a Python script writes to a terminal of its own.

    Once that shows `interrupt_at`, Ctrl-C is typed; once it shows `close_at`, it is closed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=ENVIRONMENT | {"TERM": "xterm-256color"} | environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError as error:
            assert error.errno == errno.EIO  # how Linux says that the other end is closed
            break
        if not chunk:
            break
        output += chunk
        if interrupt_at and interrupt_at.encode() in output:
            interrupt_at = ""
            os.write(ours, b"\x03")
        if close_at and close_at.encode() in output:
            break
    os.close(ours)
    assert process.wait() == code, output.decode(errors="replace")
    return output.decode(errors="replace").replace("\r\n", "\n")  # a closed one ends anywhere


SHOW = "import test_console as t; t.show('auto')"
ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z])?")
# Colour and style, line erased, cursor up, cursor hidden and shown: what rich's live display uses.
ALLOWED = re.compile(r"\x1b\[(?:[0-9;]*m|2K|1A|\?25[lh])$")


def test_terminal_shows_one_panel_with_every_field():
    output = in_terminal(SHOW)
    unexpected = {escape for escape in ESCAPES.findall(output) if not ALLOWED.match(escape)}
    assert not unexpected
    last_panel = ESCAPES.sub("", output[output.rindex("╭") : output.rindex("╯")])
    text = re.sub(r"\s+", " ", re.sub(r"[│╭╮─]", " ", last_panel))
    for field in (
        "━━━",
        "iteration 5/5",
        "ETA 0 s",
        "return (last 100 episodes) 1,234",
        "best (middle 90 of 100) 2,346",
        "episode length 321",
        "steps/s 35,213",
        "simulator steps/s 67,000",
        "KL 0.00789",
        "value loss 0.0123",
        "learning rate 0.0003",
        "env steps 327,680",
        "simulate 51 % · policy 10 % · update 38 % · log 1 %",
        "CPU 97 %, memory 1.23 GB · GPU 88 %, memory 4.5 GB",
    ):
        assert field in text, field


def panel_of(*rows: dict, title: str = "Ant · 2026-01-31_12-00-00", width: int = 100, height: int = 40) -> list[str]:
    """The lines of the panel after these rows."""
    console = Console("rich", 100, None)
    console._rich = rich.console.Console(file=io.StringIO(), width=width + 2, height=height)
    console.start([], title)
    for numbers in rows:
        console.update(numbers)
    with console._rich.capture() as shown:
        console._rich.print(console._panel())
    return shown.get().splitlines()


def test_the_banner_is_wrapped_at_words_below_its_texts():
    banner = "[('run', 'runs/' + 50 * 'x'), ('learner', 'ppo on cpu, bf16 (auto: the CPU has bf16 instructions)')]"
    script = f"import test_console as t; c = t.Console('auto', 9, None); c.start({banner}); c.close()"
    screen = render(in_terminal(script, 40), 40)
    assert screen[:2] == [f"run      runs/{26 * 'x'}", 24 * "x"], "a path is whole, to be copied"
    assert screen[2:4] == ["learner  ppo on cpu, bf16 (auto: the CPU", "         has bf16 instructions)"]


def test_the_panel_names_task_and_run():
    assert re.fullmatch(r"╭─+ Ant · 2026-01-31_12-00-00 ─+╮", panel_of(row(1))[0])


def test_reward_terms_come_by_size_below_the_other_numbers():
    terms = {"reward/upright": 0.1, "reward/effort_of_the_actuators": -2.0, "reward/alive": 0.5, "reward/off": None}
    lines = panel_of(row(1) | terms)
    names = re.findall(r"(?:task|reward)/(\w+)", " ".join(lines))
    assert names == ["level", "effort_of_the_actuators", "alive", "upright", "off"]
    at = {line.index(value) for line in lines for value in ("321 ", "3.21 ", "0.0123 ") if value in line}
    assert len(at) == 1, "all numbers stand below each other"


def test_a_minus_stands_left_of_the_digits():
    lines = panel_of(row(1) | {"reward/upright": 0.1, "reward/a": -2.0, "reward/b": 0.05, "reward/c": -1e-5})
    at = {line.index(digits) for line in lines for digits in ("2,346 ", "0.0654 ", "1e-05 ") if digits in line}
    assert len(at) == 1 and " -0.0654 " in " ".join(lines)


def test_where_there_is_room_the_groups_of_numbers_stand_apart():
    assert [number for number, line in enumerate(panel_of(row(1))) if not line.strip("│ ")] == [8, 11]
    assert not [line for line in panel_of(row(1), height=15) if not line.strip("│ ")]


@pytest.mark.parametrize("memory", [None, 4.5])
def test_the_panel_names_a_gpu_only_where_there_is_one(memory):
    text = words(panel_of(row(1, **{"system/gpu_memory_gb": memory})))
    assert ("GPU" in text) is (memory is not None) and "CPU 97 %, memory 1.23 GB" in text


def test_the_panel_draws_the_return_and_its_range():
    [line] = [text for text in panel_of(*(row(i, **{"episode/return": 2.0 * i}) for i in range(1, 81))) if "▁" in text]
    bars = re.sub("[^▁▂▃▄▅▆▇█]", "", line)
    assert bars == "".join(sorted(bars)) and bars[0] == "▁" and bars[-1] == "█" and "  2 to 160 " in line
    rows = [row(i, **{"episode/return": None if i < 20 else -5.0}) for i in range(1, 81)]
    assert "  -5 to -5 since iteration 20" in " ".join(panel_of(*rows)), "a return that does not change"
    assert "▁" not in " ".join(panel_of(row(1), row(2))), "two points are no curve"


def test_the_best_return_is_of_as_many_episodes_as_its_label_says():
    from gpusim_rl.run.console import NUMBERS
    from gpusim_rl.run.metrics import TRIMMED, WINDOW

    cut = int(TRIMMED * WINDOW)
    assert NUMBERS[f"best (middle {WINDOW - 2 * cut} of {WINDOW})"] == "episode/best_return"


@pytest.mark.slow
def test_terminal_redraws_the_panel_in_place_and_puts_text_above_it():
    screen = render(in_terminal(SHOW))
    assert sum(line.startswith("╭") for line in screen) == 1, "one panel remains, redrawn in place"
    panel = next(i for i, line in enumerate(screen) if line.startswith("╭"))
    above, below = screen[:panel], screen[panel:]
    assert above == [
        "task     Ant, 4096 envs",
        "network  [256, 128, 64] elu",
        "note [bold]x[/] {y}",
        "warning: 2 envs overflowed",
    ]
    assert below[-3:] == ["next:", *(f"  {command}" for command in COMMANDS)]


def test_terminal_cursor_is_back_at_the_end():
    output = in_terminal(SHOW)
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")


def test_terminal_output_of_other_libraries_appears_above_the_panel():
    script = (
        "import sys, test_console as t; c = t.Console('auto', 9, None); c.start(t.BANNER);"
        "c.update(t.row(1)); print('from stdout'); print('from stderr', file=sys.stderr);"
        "c.update(t.row(9)); c.close()"
    )
    screen = render(in_terminal(script))
    assert screen[2:4] == ["from stdout", "from stderr"]
    assert screen[4].startswith("╭") and screen[-1].startswith("╰")


def test_no_color_means_no_color():
    output = in_terminal(SHOW, NO_COLOR="1")
    colors = re.findall(r"\x1b\[(?:[0-9;]*;)?(?:3[0-9]|4[0-9]|9[0-7]|10[0-7])[0-9;]*m", output)
    assert "╭" in output and not colors


def test_a_dumb_terminal_gets_plain_lines():
    output = in_terminal(SHOW, TERM="dumb")
    assert "\x1b" not in output and "iteration 5/5 |" in output


VALUES = ("1,234", "2,346", "321", "35,213", "67,000", "0.00789", "0.0123", "0.0003", "0.456", "7.89", "327,680")
PAIRS = (
    "return (last 100 episodes) 1,234",
    "simulator steps/s 67,000",
    "action std 0.456",
    "entropy 7.89",
    "reward/upright 0.987",
    "reward/effort_of_the_actuators -0.0654",
    "task/level 3.21",
)
ITEMS = (
    "51 %",
    "10 %",
    "38 %",
    "1 %",
    "CPU 97 %, memory 1.23 GB",
    "GPU 88 %, memory 4.5 GB",
    "iteration 5/5",
    "ETA 0 s",
)


@pytest.mark.parametrize("columns", [40, *(pytest.param(n, marks=pytest.mark.slow) for n in (60, 80, 100)), 300])
def test_no_value_is_cut_at_any_usual_width(columns):
    screen = render(in_terminal(SHOW, columns), columns)
    panel = [line for line in screen if line[0] in "╭│╰"]
    assert {len(line) for line in panel} == {min(columns - 2, 100)}
    text = words(panel)
    for field in (*VALUES, *PAIRS, *ITEMS):
        assert f" {field} " in text, field


@pytest.mark.slow
def test_even_a_terminal_of_20_columns_gets_a_panel():
    screen = render(in_terminal(SHOW, columns=20), 20)
    panel = words([line for line in screen if line[0] in "╭│╰"])
    for value in VALUES:
        assert f" {value} " in panel, value


def test_a_low_terminal_says_how_much_it_leaves_out():
    many = "{f'reward/term_{i}': 0.5 + i for i in range(40)}"
    script = f"import test_console as t; c = t.Console('auto', 9, None); c.update(t.row(1) | {many}); c.start([])"
    screen = render(in_terminal(f"{script}; import os; os._exit(0)", 80, lines=24), 80)
    assert screen[0].startswith("╭") and screen[-1].startswith("╰") and 20 <= len(screen) <= 23
    left_out = re.search(r"and (\d+) more in metrics.csv", words(screen))
    assert left_out is not None
    assert len(re.findall(r"reward/|task/", words(screen))) == 43 - int(left_out.group(1))


NOTICE = "stoppingafterthisiteration,withacheckpoint;oncemorestopsatonce"
INTERRUPTED = """
import sys, time
import test_console as t
from gpusim_rl.run.stop_signal import StopSignal
console, stop = t.Console('auto', 100, None, min_interval_s=0.0), StopSignal()
stop.notify = console.notice
with stop:
    console.start(t.BANNER)
    for iteration in range(1, 100):
        console.update(t.row(iteration))
        time.sleep(0.02)
        if stop.number is not None:
            break
    for _ in range(2):  # what the end of a run writes
        console.update(t.row(iteration))
        console.info('one more line')
    console.footer(t.COMMANDS)
    console.close()
"""


@pytest.mark.parametrize("columns", [40, *(pytest.param(n, marks=pytest.mark.slow) for n in (60, 80, 100))])
def test_ctrl_c_leaves_the_panel_whole_and_its_notice_visible(columns):
    output = in_terminal(INTERRUPTED, columns, interrupt_at="1,234")
    assert "^C" in output
    screen = render(output, columns)
    text = " ".join(screen)
    assert NOTICE in "".join(screen).replace(" ", ""), "wrapped, perhaps"
    panel = [number for number, line in enumerate(screen) if line[0] in "╭│╰"]
    assert panel == list(range(panel[0], panel[-1] + 1)), screen
    assert "".join(screen[number][0] for number in panel) == "╭" + "│" * (len(panel) - 2) + "╰"
    assert {len(screen[number]) for number in panel} == {columns - 2}
    assert "^C" not in text


def last_iteration(run: Path) -> int:
    from gpusim_rl.run import checkpoint  # takes torch in, which a terminal of these tests can do without

    return checkpoint.load(run / "checkpoints" / "last.pt")["iteration"]


def training(folder: Path) -> str:
    """A script that trains until it is stopped."""
    small = ["num_envs=8", "ppo.horizon=8", "ppo.epochs=1", "ppo.network.hidden=[16]", "max_iterations=100000"]
    argv = [str(ROOT / "train.py"), *small, f"log.dir={folder}"]
    return f"import sys, runpy; sys.argv = {argv}; runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.mark.slow
def test_a_terminal_that_is_closed_leaves_a_checkpoint(tmp_path):
    in_terminal(training(tmp_path), close_at="reward/upright", code=129, PYTHONPATH=str(ROOT))
    (run,) = tmp_path.glob("Cartpole/2*")
    saved = last_iteration(run)
    assert len((run / "metrics.csv").read_text().splitlines()) == 1 + saved
    log = (run / "train.log").read_text()
    assert "  stopping after this iteration, with a checkpoint; once more stops at once\n" in log
    assert log.endswith(f"plot.py {run}\n")


def test_ctrl_c_in_a_real_training(tmp_path):
    output = in_terminal(
        training(tmp_path), 60, lines=30, interrupt_at="reward/upright", code=130, PYTHONPATH=str(ROOT)
    )
    screen = render(output, 60)
    assert NOTICE in "".join(screen).replace(" ", ""), "wrapped, perhaps"
    panel = [number for number, line in enumerate(screen) if line[0] in "╭│╰"]
    assert panel == list(range(panel[0], panel[-1] + 1)), screen
    assert "".join(screen[number][0] for number in panel) == "╭" + "│" * (len(panel) - 2) + "╰"
    shown = re.search(r"iteration (\S+)/100000", words(screen))
    assert shown is not None
    (run,) = tmp_path.glob("Cartpole/2*")
    assert int(shown.group(1).replace(",", "")) == last_iteration(run)


@pytest.mark.parametrize("mode", ["plain", "json", "quiet", "rich"])
def test_a_notice_in_the_middle_of_a_line_follows_it(mode, capsys):
    console = Console(mode, 9, None)
    with console._whole():
        console.notice("stopping")
        assert capsys.readouterr() == ("", "")
    out, err = capsys.readouterr()
    if mode == "json":
        assert json.loads(out) == {"event": "notice", "text": "stopping"}
    else:
        assert (out + err).strip() == "stopping"


# An iteration that takes long


@pytest.mark.parametrize("mode", ["rich", "plain", "json", "quiet"])
def test_a_long_iteration_shows_where_it_is(mode, monkeypatch, capsys):
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


def test_the_panel_shows_where_a_long_iteration_is():
    script = (
        "import time, test_console as t; import gpusim_rl.run.console as module\n"
        "module.PROGRESS_INTERVAL_S['rich'] = 0.0\n"
        "c = t.Console('auto', 9, None); c.start(t.BANNER); c.progress('iteration 1: control step 5/16')\n"
        "import os; os._exit(0)"
    )
    screen = render(in_terminal(script, 40), 40)
    assert re.fullmatch("╰─+ iteration 1: control step 5/16 ─+╯", screen[-1])


def render(output: str, columns: int = 110) -> list[str]:
    """The screen after the output: a terminal that wraps, with line feed, erase line and cursor up."""
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
            if x == columns:  # wraps only now: after the last column the cursor waits there
                y, x = y + 1, 0
            lines += [""] * (y + 1 - len(lines))
            lines[y] = lines[y][:x].ljust(x) + piece + lines[y][x + 1 :]
            x += 1
        lines += [""] * (y + 1 - len(lines))
    return [line.rstrip() for line in lines if line.strip()]


# A display that goes away


@pytest.mark.parametrize(
    "mode", ["plain", *(pytest.param(m, marks=pytest.mark.slow) for m in ("json", "rich", "quiet"))]
)
def test_a_reader_that_leaves_does_not_end_the_run(mode):
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
    if mode != "quiet":
        assert os.read(read_end, 100)
    os.close(read_end)  # as `python train.py | head` does
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert err == "reached the end"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "plain", "json", "rich", "quiet"])
def test_a_run_started_without_stdout_and_stderr_works(mode, tmp_path):
    script = "import sys, pathlib, test_console as t; t.show(sys.argv[1], log=pathlib.Path(sys.argv[2]))"
    command = f"exec {sys.executable} -c '{script}' {mode} {tmp_path}/train.log >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, env=ENVIRONMENT).returncode == 0
    assert COMMANDS[0] in (tmp_path / "train.log").read_text()


def test_a_closed_stdout_is_ignored(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    show("plain")
    show("rich")


@pytest.mark.slow
def test_signs_that_a_terminal_does_not_have_are_replaced():
    done = subprocess.run(
        [sys.executable, "-c", "import test_console as t; t.show('plain')"],
        cwd=ROOT,
        env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert b"ETA ?" in done.stdout


# Names and settings of a stranger's

HOSTILE = "a\nb\r\x1b[2J\x9b\u2028[red]"
SAFE = "a\\nb\\r\\x1b[2J\\x9b\\u2028[red]"


@pytest.mark.parametrize("mode", ["plain", "rich"])
def test_whatever_a_line_holds_it_is_one_line(mode, tmp_path, capsys):
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


def test_names_in_the_panel_are_text():
    script = (
        "import test_console as t; import gpusim_rl.run.console as module\n"
        "module.PROGRESS_INTERVAL_S['rich'] = -1.0\n"
        "c = t.Console('auto', 9, None); c.start([]); name = t.HOSTILE\n"
        "c.update({'iteration': 1, f'task/{name}': 1.0, f'loss/{name}': 2.0}); c.progress(f'at {name}'); c.close()"
    )
    output = in_terminal(script)
    assert all(f"{place}{SAFE}" in output for place in ("task/", "loss/", "at ")), output
    assert all(ALLOWED.match(escape) for escape in ESCAPES.findall(output)), output
    assert not set("\x9b\u2028") & set(output) and "\x1b[2J" not in output
