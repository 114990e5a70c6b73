"""Untrusted run folders: no code is executed, no file outside is touched, rejected in one line.

docs/security.md refers to these tests. Each entry of `HOSTILE` turns a real run folder into a hostile one.
"""

from __future__ import annotations

import hashlib
import html
import io
import json
import os
import pickle
import re
import shlex
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gpusim_rl
from gpusim_rl.diagnose.rules import diagnose
from gpusim_rl.diagnose.run_stats import read_rows, read_run_stats
from gpusim_rl.diagnose.short_training import Measurement
from gpusim_rl.errors import ConfigError
from gpusim_rl.export import files
from gpusim_rl.export.card import describe
from gpusim_rl.export.model import ExportedPolicy
from gpusim_rl.files import checkpoint_file
from gpusim_rl.files.paths import find_checkpoint
from gpusim_rl.files.safe_open import dump_yaml, load_yaml
from gpusim_rl.run import writers
from gpusim_rl.settings import overrides as overrides_grammar
from gpusim_rl.settings.compose import compose
from gpusim_rl.view.curves import read_run
from gpusim_rl.view.player import Player
from gpusim_rl.view.replay_dump import DumpReplay
from helpers.checkpoints import sealed
from helpers.commands import ROOT, run_here

pytest_plugins = ["helpers.tool_runs"]

EVIL = "import os\nopen(os.environ['EXECUTED'], 'w').write('yes')\nclass Evil:\n    def __init__(self, **_): pass\n"


class Stranger:
    """Downloaded `run`, working directory `here` with a module `evil`, `home` outside, file written by its code."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.here, self.home, self.executed = folder / "here", folder / "home", folder / "executed"
        self.run = Path(shutil.copytree(source, self.here / "downloaded"))
        (self.here / "evil.py").write_text(EVIL)
        (self.home / "precious").mkdir(parents=True)
        for name in (".profile", "precious/thesis.tex", "precious/last.pt", "precious/000050.pt"):
            (self.home / name).write_text(f"all I have: {name}\n")
        self.before = self.outside()

    def outside(self) -> dict[str, bytes]:
        """Return all files of the home."""
        return {str(path): path.read_bytes() for path in sorted(self.home.rglob("*")) if path.is_file()}

    def settings(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change config.yaml, with a valid digest."""
        settings = load_yaml(self.run / "config.yaml")
        change(settings)
        (self.run / "config.yaml").write_bytes(dump_yaml(settings))

    def checkpoint(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change last.pt, with a valid digest."""
        state = checkpoint_file.load(self.run / "checkpoints" / "last.pt")
        change(state)
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self.write(buffer.getvalue())

    def write(self, archive: bytes) -> None:
        """Write last.pt, with a valid digest."""
        sealed(self.run / "checkpoints" / "last.pt", archive)

    def pickle(self, content: bytes, compress: int = zipfile.ZIP_STORED) -> None:
        """Replace the pickle in last.pt."""
        buffer, source = io.BytesIO(), zipfile.ZipFile(self.run / "checkpoints" / "last.pt")
        with zipfile.ZipFile(buffer, "w", compress) as archive:
            for entry in source.infolist():
                archive.writestr(entry.filename, content if entry.filename.endswith("data.pkl") else source.read(entry))
        self.write(buffer.getvalue())


def overrides(*lines: str) -> Callable[[Stranger], None]:
    return lambda it: (it.run / "overrides.yaml").write_bytes(dump_yaml(["task=Cartpole", *lines])) and None


def settings(**values: Any) -> Callable[[Stranger], None]:
    return lambda it: it.settings(lambda saved: saved.update(values))


def both(change: Callable[[dict[str, Any]], Any]) -> Callable[[Stranger], None]:
    def make(it: Stranger) -> None:
        it.settings(change)
        it.checkpoint(lambda state: change(state["config"]))

    return make


def rerun(it: Stranger) -> None:
    (it.run / "rerun.pickle").write_bytes(b"cbuiltins\nexec\n(%btR." % pickle.dumps(EVIL, 0)[:-1])
    overrides(f"--experimental-rerun={it.run}/rerun.pickle")(it)


def fake_package(it: Stranger) -> None:
    """Pretend that the current directory is an installed package."""
    folder = it.here / "evil-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[gpusim_rl.cfg]\nevil = evil.cfg\n")
    both(lambda saved: saved["task"].update(_target_="evil.Evil"))(it)


def factory(target: str, **kwargs: Any) -> Callable[[Stranger], None]:
    """Env factory of a third-party module that training imports anyway."""

    def make(it: Stranger) -> None:
        def change(saved: dict[str, Any]) -> None:
            texts = json.dumps(kwargs).replace("HERE", str(it.here)).replace("HOME", str(it.home))
            saved["task"] = compose(["task=Gymnasium"])["task"]
            saved["env"].update(_target_=target, kwargs=json.loads(texts))

        (it.run / "hubconf.py").write_text(EVIL)
        both(change)(it)
        it.checkpoint(lambda state: state.update(task="GymnasiumEnv"))

    return make


def link(name: str, target: str) -> Callable[[Stranger], None]:
    def make(it: Stranger) -> None:
        path = it.run / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(it.home / target)

    return make


def pipe(name: str) -> Callable[[Stranger], None]:
    def make(it: Stranger) -> None:
        (it.run / name).unlink(missing_ok=True)
        os.mkfifo(it.run / name)

    return make


@dataclass(frozen=True)
class RawYaml:
    """config.yaml of this text, with a valid digest."""

    text: str

    def __call__(self, it: Stranger) -> None:
        body = self.text.encode()
        (it.run / "config.yaml").write_bytes(b"# sha256 " + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def compressed(it: Stranger) -> None:
    it.checkpoint(lambda state: state.update(zeros=torch.zeros(10_000_000, dtype=torch.uint8)))
    source = zipfile.ZipFile(it.run / "checkpoints" / "last.pt")
    name = next(entry.filename for entry in source.infolist() if entry.filename.endswith("data.pkl"))
    it.pickle(source.read(name), zipfile.ZIP_DEFLATED)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
NESTED = b"\x80\x02]q\x00(K\x01K\x01e" + b"".join(
    b"]q%c(%se" % (number, b"h%c" % (number - 1) * 10) for number in range(1, 30)
)  # each list holds the previous one ten times
TEXT = {word: b"X" + struct.pack("<I", len(word)) + word.encode() for word in ("format", "gpusim_rl", "more")}
ENDLESS = NESTED + b"}(%bK\x04%b%b%bh\x1du." % (TEXT["format"], TEXT["gpusim_rl"], TEXT["gpusim_rl"], TEXT["more"])
GIGABYTES = 3_000_000_000
BYTEARRAY = b"\x80\x02cbuiltins\nbytearray\n\x8a\x05" + GIGABYTES.to_bytes(5, "little") + b"\x85R."

CLASS = {"_target_": "evil.Evil"}
COPY = {"_target_": "shutil.copyfile", "src": "HERE/evil.py", "dst": "HOME/.profile"}

HOSTILE: dict[str, tuple[Callable[[Stranger], None], str]] = {
    # 1. Code through Hydra
    "flag that unpickles a file": (rerun, "'--experimental-rerun="),
    "hydra.": (overrides("hydra.job.chdir=true"), "got 'hydra.job.chdir=true'"),
    "hydra section": (settings(hydra={"callbacks": {"a": {"_target_": "evil.Evil"}}}), "key 'hydra'"),
    # 2. Code through a class
    "task class": (both(lambda s: s["task"].update(CLASS)), "task._target_=evil.Evil"),
    "algorithm class": (both(lambda s: s["algo"].update(CLASS)), "algo._target_=evil.Evil"),
    "network class": (both(lambda s: s["ppo"]["network"].update(CLASS)), "ppo.network._target_=evil.Evil"),
    "function of Hydra": (
        factory("hydra.utils.instantiate", config={"_target_": "builtins.dict", "x": COPY}),
        "env._target_=hydra.utils.instantiate",
    ),
    "task of a package in the working directory": (fake_package, "task._target_=evil.Evil"),
    # 3. Other files through links
    "link in place of a temporary file": (link("config.yaml.tmp", ".profile"), "config.yaml.tmp is a link to"),
    "link in place of the log": (link("train.log", ".profile"), "train.log is a link to"),
    "link in place of the checkpoints": (link("checkpoints", "precious"), "checkpoints is a link to"),
    "link in place of a checkpoint": (link("checkpoints/best.pt", "precious/last.pt"), "best.pt is a link to"),
    "pipe in place of the metrics": (pipe("metrics.csv"), "metrics.csv is a named pipe"),
    "pipe in place of the settings": (pipe("env.json"), "env.json is a named pipe"),
    # 4. The environment
    "interpolation": (both(lambda s: s.update(wandb_name="${oc.env:SECRET}")), "wandb_name is the interpolation"),
    # 5. Bombs
    "aliases": (RawYaml(BOMB), "anchors and aliases"),
    "tag": (RawYaml("task: !!python/object/apply:os.system ['touch x']\n"), "the tag "),
    "deep nesting": (RawYaml("a: " + "[" * 5000), "too deeply nested"),
    "huge text": (RawYaml("a: " + "x" * 2_000_000), "1048576 bytes"),
    "huge int": (RawYaml("a: 1" + "0" * 50_000), "50001 characters"),
    "compressed checkpoint": (compressed, "compressed"),
    "pickle that allocates memory": (lambda it: it.pickle(BYTEARRAY), "'builtins bytearray'"),
    "pickle that runs code": (lambda it: it.pickle(b"cposix\nsystem\n(S'touch x'\ntR."), "'posix system'"),
    "pickle of nested lists": (lambda it: it.pickle(ENDLESS), "too many values"),
    "expanded tensor": (
        lambda it: it.checkpoint(lambda state: state.update(policy={"w": torch.zeros(1).expand(GIGABYTES)})),
        "too many values",
    ),
}


YAMLS = [kind for kind in HOSTILE if isinstance(HOSTILE[kind][0], RawYaml)]
ONLY_IN_SETTINGS = [*list(HOSTILE)[:3], *YAMLS]  # read by a resumed run only; playing needs just the checkpoint
# Rejected by plot, report and doctor too, which import no class and read no checkpoint.
BY_ALL_TOOLS = [kind for kind, (_, words) in HOSTILE.items() if " is a link to" in words or " is a named pipe" in words]
BY_ALL_TOOLS += ["interpolation", *YAMLS]
FAST = ["network class", "link in place of a checkpoint", "interpolation"]


@pytest.fixture
def stranger(runs_folder: Path, tmp_path: Path) -> Stranger:
    source = sorted(path for path in (runs_folder / "runs" / "Cartpole").glob("2*") if path.is_dir())[0]
    return Stranger(source, tmp_path)


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_run_folder_is_rejected_in_one_line(stranger: Stranger, kind: str) -> None:
    make, words = HOSTILE[kind]
    make(stranger)
    secret = os.urandom(8).hex()  # cannot occur in git.diff
    env = {"EXECUTED": str(stranger.executed), "SECRET": secret}
    commands: list[tuple[Any, ...]] = [("train.py", "checkpoint=downloaded", "max_iterations=8")]
    if kind not in ONLY_IN_SETTINGS:
        commands.append(("tools/play.py", "downloaded", "--viewer", "none", "--steps", "2"))
    for script, *arguments in commands:
        done = run_here(ROOT / script, *arguments, cwd=stranger.here, env=env)
        assert done.returncode == 2, done
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and words in done.stderr, done.stderr
        assert secret not in done.stdout + done.stderr
    assert not stranger.executed.exists(), "code of the folder was executed"
    assert stranger.outside() == stranger.before, "a file outside the folder was touched"
    kept = [path.read_bytes() for path in stranger.run.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not any(secret.encode() in content for content in kept)


@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in HOSTILE]
)
def test_no_tool_executes_a_hostile_run_folder(
    stranger: Stranger, load_tool, monkeypatch, capsys, tmp_path: Path, kind: str
) -> None:
    make, words = HOSTILE[kind]
    make(stranger)
    monkeypatch.chdir(stranger.here)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("EXECUTED", str(stranger.executed))
    monkeypatch.setenv("SECRET", "of the environment")
    small = ("--width", "32", "--height", "32")
    # skip the export of networks, which takes seconds
    card = {"parity": {"observations": 1, "files": {}}, "latency_us": {"calls": 1, "median": {}}}

    def write(player: Player, *_: Any, **__: Any) -> dict[str, Any]:
        assert player.policy is not None
        model = ExportedPolicy(player.policy, clip_observations=None, clip_actions=None, control=None)
        return {**describe(player, model, None, None), **card}

    monkeypatch.setattr(files, "_write", write)
    commands = {
        "record": ("--steps", "2", "--num-envs", "1", *small),
        "snapshot": ("--policy", "trained", *small),
        "export": (),
        "transfer": ("--only", "trained", "--num-envs", "1", "--seconds", "0.1"),
        **({"stress": (), "share": ()} if kind not in ONLY_IN_SETTINGS else {}),
        "clip": ("--seconds", "0.1", "--out", "downloaded/x.npz", "--overwrite"),
        "collect": ("--steps", "2", "--num-envs", "1", "--overwrite", "--out", str(tmp_path / "collected.npz")),
        "plot": (),
        "report": ("--no-replay",),
        "doctor": (),
    }
    for name, options in commands.items():
        refused = kind in BY_ALL_TOOLS if name in ("plot", "report", "doctor") else kind not in ONLY_IN_SETTINGS
        try:
            code = load_tool(name).main([*["record"] * (name == "clip"), "downloaded", *options])
        except SystemExit as ended:
            code = ended.code
        printed, error = capsys.readouterr()
        assert code == (2 if refused else 0), (name, code, error)
        assert "of the environment" not in printed + error
        if refused:
            assert error.startswith("error: ") and error.count("\n") == 1 and words in error, (name, error)
    assert not stranger.executed.exists(), "code of the folder was executed"
    assert stranger.outside() == stranger.before, "a file outside the folder was touched"


def test_settings_inside_a_checkpoint_are_not_executed(stranger: Stranger) -> None:
    factory("torch.hub.load", repo_or_dir="HERE/downloaded", source="local", model="Evil")(stranger)
    (stranger.run / "config.yaml").unlink()
    env = {"EXECUTED": str(stranger.executed)}
    done = run_here(ROOT / "train.py", "checkpoint=downloaded", "max_iterations=8", cwd=stranger.here, env=env)
    assert not stranger.executed.exists(), "code of the folder was executed"
    assert done.returncode == 2 and "last.pt: env._target_=torch.hub.load" in done.stderr.splitlines()[-1], done.stderr


def test_class_is_imported_only_with_trust(stranger: Stranger, train_cli) -> None:
    both(lambda saved: saved["task"].update(_target_="mine.Mine"))(stranger)
    code = "from gpusim_rl.tasks.cartpole import Cartpole\nclass Mine(Cartpole): pass\n"
    (stranger.here / "mine.py").write_text(code)
    stranger.checkpoint(lambda state: state.update(task="Mine"))
    words = ("checkpoint=downloaded", "max_iterations=7", "log.console=quiet")
    done = train_cli(*words, cwd=stranger.here, check=False)
    assert "would run code" in done.stderr and "trust=true" in done.stderr
    train_cli(*words, "trust=true", cwd=stranger.here)
    shutil.copy(stranger.run / "checkpoints" / "last.pt", stranger.here / "lone.pt")  # also contains settings
    done = train_cli("checkpoint=lone.pt", "max_iterations=9", "log.console=quiet", cwd=stranger.here, check=False)
    assert "lone.pt: task._target_=mine.Mine would run code" in done.stderr


def test_saved_log_folder_is_ignored_when_branching(stranger: Stranger, train_here) -> None:
    """A branch creates its folder below the user's log.dir, not the saved one."""
    both(lambda saved: saved["log"].update(dir=str(stranger.home)))(stranger)
    numbered = stranger.run / "checkpoints" / "000001.pt"
    shutil.copy(stranger.run / "checkpoints" / "last.pt", numbered)
    train_here(f"checkpoint={numbered}", "max_iterations=7", "log.console=quiet", cwd=stranger.here)
    assert stranger.outside() == stranger.before and len(list((stranger.here / "runs" / "Cartpole").glob("2*"))) == 1


def test_plot_never_writes_through_a_link(stranger: Stranger, load_tool, monkeypatch) -> None:
    plot = load_tool("plot")
    monkeypatch.chdir(stranger.here)
    link("episode_return.png", ".profile")(stranger)
    with pytest.raises(ConfigError, match=r"episode_return\.png is a link"):
        plot.plot(plot.parse(["downloaded"]))
    (stranger.run / "episode_return.png").unlink()
    out = stranger.here / "mine.png"
    out.symlink_to(stranger.home / ".profile")
    plot.plot(plot.parse(["downloaded", "--out", str(out), "--overwrite"]))
    assert out.read_bytes().startswith(b"\x89PNG") and not out.is_symlink()
    assert stranger.outside() == stranger.before


@pytest.mark.parametrize("reader", ["plot", "doctor", "resume"])
def test_metrics_reader_limits_size_and_rejects_links(stranger: Stranger, load_tool, monkeypatch, reader: str) -> None:
    file = stranger.run / "metrics.csv"
    read = {
        "plot": lambda: read_run(stranger.run),
        "doctor": lambda: read_rows(file),
        "resume": lambda: writers.CsvWriter(file, resumed_at=3).start({}),
    }[reader]
    read()
    with monkeypatch.context() as patched, pytest.raises(ConfigError, match=r"metrics\.csv: .*100 bytes"):
        patched.setattr(writers, "METRICS_BYTES", 100)
        read()
    file.rename(stranger.home / "metrics.csv")
    link("metrics.csv", "metrics.csv")(stranger)
    with pytest.raises(ConfigError, match=r"metrics\.csv is a link"):
        read()


WRONG_TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "sim": ({"sim": ["mujoco"]}, "sim .* list"),
    "env": ({"env": {}}, "does not match task Cartpole"),
    "policy": ({"policy": {}}, "does not match task Cartpole.*: Error"),
    "sizes": ({"obs_sizes": {"policy": torch.zeros(2)}}, "does not match task Cartpole"),
    "iteration": ({"iteration": [1]}, "iteration .* list"),
    "seed": ({"seed": "abc"}, "seed .* str"),
    "time": ({"elapsed_s": float("nan")}, "elapsed_s is nan"),
    "command line": ({"overrides": [5]}, "overrides"),
}


@pytest.mark.parametrize("kind", WRONG_TYPES)
def test_checkpoint_with_wrong_value_types_is_rejected(stranger: Stranger, monkeypatch, kind: str) -> None:
    change, words = WRONG_TYPES[kind]
    stranger.checkpoint(lambda state: state.update(change))
    monkeypatch.chdir(stranger.here)
    with pytest.raises(ConfigError, match=words):
        Player.open("downloaded")
    with pytest.raises(ConfigError, match=words):
        gpusim_rl.train("Cartpole", checkpoint="downloaded", max_iterations=8, log={"console": "quiet"})


def dump(it: Stranger) -> dict[str, Any]:
    """Return the dump of a diverged env of the stranger's run."""
    saved = checkpoint_file.load(it.run / "checkpoints" / "last.pt")
    about = {key: saved[key] for key in ("task", "config", "sim", "iteration")}
    state = {"cartpole": {"joint_pos": torch.zeros(2), "joint_vel": torch.zeros(2)}}
    return {**about, "env": 3, "episode_step": 5, "state": state, "action": torch.zeros(1)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"episode_step": None}, "episode_step"),
        ({"sim": "nosuch"}, "nosuch"),
        ({"config": {"task": {}, "algo": [1]}}, "settings"),
        ({"action": torch.zeros(2)}, "action of 1"),
        ({"state": {"cartpole": 5}}, "Cartpole"),
        ({"state": {"cartpole": {"joint_pos": torch.zeros(7)}}}, "Cartpole"),
    ],
)
def test_invalid_divergence_dump_is_rejected(stranger: Stranger, change: dict[str, Any], words: str) -> None:
    file = stranger.run / "diverged.pt"
    checkpoint_file.save(file, dump(stranger))
    with closing(DumpReplay.open(file)) as shown:
        assert list(iter(shown.step, None))[-1].startswith("did not diverge")
    changed = {key: value for key, value in {**dump(stranger), **change}.items() if value is not None}
    checkpoint_file.save(file, changed)
    with pytest.raises(ConfigError, match=words):
        DumpReplay.open(file)


def test_checkpoint_replay_requires_overrides(stranger: Stranger) -> None:
    stranger.checkpoint(lambda state: state.pop("overrides"))
    with pytest.raises(ConfigError, match="overrides"):
        DumpReplay.open(stranger.run / "checkpoints" / "last.pt")


def test_plot_draws_settings_as_plain_text(stranger: Stranger, load_tool) -> None:
    """A dollar starts a matplotlib formula, and keys may be numbers."""
    plot = load_tool("plot")
    stranger.settings(lambda saved: saved["task"].update({"_target_": "a.B$\\nosuch$", 5: 6}))
    assert plot.plot(plot.parse([str(stranger.run)])).read_bytes().startswith(b"\x89PNG")
    for change in ({"seed": "abc"}, {"task": {}}):
        settings(**change)(stranger)
        with pytest.raises(ConfigError, match=r"config\.yaml: not the settings"):
            plot.plot(plot.parse([str(stranger.run)]))


def test_plot_rejects_invalid_metrics(stranger: Stranger, load_tool) -> None:
    plot, report = load_tool("plot"), load_tool("report")
    for columns in ("", "iteration,env_steps,time/elapsed_s,episode/return\n1,-1e308,-5,1e308\n"):
        (stranger.run / "metrics.csv").write_text(columns)
        with pytest.raises(ConfigError, match=r"metrics\.csv"):
            plot.plot(plot.parse([str(stranger.run)]))
    assert report.report(report.parse([str(stranger.run), "--no-replay"])).is_file()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sim": {"name": "nosuch"}}, "sim is 'nosuch'"),
        ({"sim": 5}, "invalid config.yaml or env.json"),
        ({"cpu": {"available": -1}}, "invalid config.yaml or env.json"),
    ],
    ids=str,
)
def test_doctor_rejects_invalid_machine_info(stranger: Stranger, change: dict[str, Any], words: str) -> None:
    file = stranger.run / "env.json"
    assert diagnose(read_run_stats(stranger.run)) is not None
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigError, match=words):
        read_run_stats(stranger.run)


@pytest.mark.parametrize(("key", "value"), [("num_envs", 0), ("ppo.minibatch_size", "x"), ("task.control_hz", [1])])
def test_doctor_rejects_invalid_settings(stranger: Stranger, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    stranger.settings(lambda saved: (saved[sections[0]] if sections else saved).update({name: value}))
    with pytest.raises(ConfigError, match=r"invalid config\.yaml or env\.json"):
        diagnose(read_run_stats(stranger.run))


ESCAPES = "\x1b]0;gone\x07\x1b[2J\r\x9b\u2028\u202e[red]\nerror: forged"
AS_TEXT = "\\x1b]0;gone\\x07\\x1b[2J\\r\\x9b\\u2028\\u202e[red]\\nerror: forged"


def assert_is_text(text: str) -> None:
    assert not any(line.startswith("error: forged") for line in text.splitlines()), ascii(text)
    assert not any(sign in text for sign in ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\u2028", "\u202e")), ascii(text)


def test_escape_sequences_are_printed_as_text(stranger: Stranger, train_here, tool_here) -> None:
    run = stranger.run.rename(stranger.here / f"down{ESCAPES}loaded")
    (run / "overrides.yaml").write_bytes(dump_yaml(["task=Cartpole", f"wandb_name={ESCAPES}"]))
    both(lambda saved: saved.update(wandb_name=ESCAPES))(stranger_at(stranger, run))
    texts = []
    for console, iterations in (("plain", 7), ("rich", 8)):
        words = (f"max_iterations={iterations}", f"log.console={console}")
        done = train_here(f"checkpoint={run}", *words, cwd=stranger.here)
        assert done.returncode == 0, done
        texts += [done.stdout, done.stderr]
    for name, *options in (("play", "--viewer", "none", "--steps", "2"), ("report", "--no-replay"), ("doctor",)):
        done = tool_here(name, run, *options, cwd=stranger.here)
        assert done.returncode == 0, done
        texts += [done.stdout, done.stderr]
    both(lambda saved: saved["task"].update(_target_=f"evil.{ESCAPES}"))(stranger_at(stranger, run))
    done = train_here(f"checkpoint={run}", cwd=stranger.here)
    assert done.returncode == 2, done
    texts.append(done.stderr)
    for text in texts:
        assert_is_text(text)
    assert "\\x1b]0;gone" in texts[-1]


def test_doctor_prints_names_as_text(load_tool, monkeypatch, capsys) -> None:
    tool = load_tool("doctor")
    monkeypatch.setattr(tool, "checked", lambda *_: (ESCAPES, 8))
    point = Measurement(error=ESCAPES)
    monkeypatch.setattr("gpusim_rl.diagnose.short_training.measure_training", lambda *_, **__: point)
    tool.main(["scaling", "task=Ant", "--num-envs", "8", "--device", "cpu"])
    tool.main(["scaling", "task=Ant", "algo=impala", "actors=process", "--num-actors", "1"])
    for text in capsys.readouterr():
        assert_is_text(text)
        assert text == "" or ("\\x1b]0;gone" in text and "[red]" in text), text


def test_viewer_window_prints_names_as_text(stranger: Stranger, load_tool, monkeypatch, capsys) -> None:
    """Output while a window is open; the window itself is replaced."""
    play = load_tool("play")
    run = stranger.run.rename(stranger.here / f"down{ESCAPES}loaded")
    viewer = SimpleNamespace(cam=SimpleNamespace(), is_running=lambda: True, lock=nullcontext, sync=lambda: None)
    monkeypatch.setattr(play, "window", lambda *_: nullcontext(viewer))
    monkeypatch.setattr(play, "FOLLOW_INTERVAL_S", -1.0)
    with closing(Player.open(str(run))) as player:
        os.utime(run / "checkpoints" / "last.pt", ns=(0, 0))  # looks like a newer checkpoint
        play.watch(player, 1)
        monkeypatch.setattr(player, "step", lambda: f"action {ESCAPES}")  # as in a replay
        play.watch(player, 1)
    printed = capsys.readouterr().out
    assert printed.count(AS_TEXT) == 2 and "\x1b" not in printed


def stranger_at(stranger: Stranger, run: Path) -> Stranger:
    stranger.run = run
    return stranger


def test_links_to_another_run_are_rejected(stranger: Stranger, monkeypatch) -> None:
    monkeypatch.chdir(stranger.here)
    victim = Path(shutil.copytree(stranger.run, stranger.here / "victim"))
    (stranger.run / "latest").symlink_to("../victim")
    with pytest.raises(ConfigError, match=r"downloaded/latest is a link .*victim"):
        find_checkpoint("downloaded")
    group = stranger.here / "group"
    group.mkdir()
    (group / "latest").symlink_to("../victim")
    with pytest.raises(ConfigError, match=r"group/latest .*victim"):
        find_checkpoint("group")
    last = stranger.here / "other" / "checkpoints" / "last.pt"
    last.parent.mkdir(parents=True)
    last.symlink_to(victim / "checkpoints" / "last.pt")
    with pytest.raises(ConfigError, match=r"last\.pt is a link"):
        find_checkpoint("other/checkpoints/last.pt")


def test_deeply_nested_folder_is_rejected(stranger: Stranger) -> None:
    deep = stranger.run
    for _ in range(40):
        deep = deep / "a"
    deep.mkdir(parents=True)
    with pytest.raises(ConfigError, match="nested 21 deep"):
        find_checkpoint(str(stranger.run))


NO_COMMAND: dict[str, Callable[[Stranger], None]] = {
    "class in the settings": lambda it: it.settings(lambda cfg: cfg["task"].update(_target_="evil.Evil")),
    "no overrides.yaml": lambda it: (it.run / "overrides.yaml").unlink(),
    "flag": overrides("-cd", "/tmp/evil"),
    "hydra setting": overrides("hydra/launcher=evil"),
    "interpolation": overrides("task.gear=${oc.env:HOME}"),
    "other task": overrides("task=Ant"),
    "invalid key": overrides("$(touch x)=1"),
    "key with a line break": overrides("num_envs\ntouch x=1"),
    "deletion": overrides("~task.gear=1"),
    "env of another library": lambda it: it.settings(lambda cfg: cfg.update(env={"id": "evil:Env-v0"})),
}


@pytest.mark.parametrize("kind", NO_COMMAND)
def test_report_shows_no_command_for_rejected_settings(stranger: Stranger, load_tool, kind: str) -> None:
    NO_COMMAND[kind](stranger)
    commands, page = reported(stranger, load_tool)
    assert commands == [] and "No command for" in page


def reported(it: Stranger, load_tool) -> tuple[list[str], str]:
    """Return a report's commands and page."""
    load_tool("report").main([str(it.run), "--no-replay"])
    page = (it.run / "report.html").read_text()
    shown = [html.unescape(text) for text in re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.DOTALL)]
    return shown, page


def test_report_command_has_quoted_values_of_the_settings(stranger: Stranger, load_tool) -> None:
    name = "'; touch executed; echo '$(touch executed)`touch executed` !x \\"
    touched = ("ppo.learning_rate=$(touch executed)", "num_envs=16; touch executed", "wandb_project=x")
    overrides(*touched, "trust=true", "log.dir=/tmp/evil", "checkpoint=/etc/passwd")(stranger)
    stranger.settings(lambda cfg: cfg.update(wandb_project=name))
    commands, _ = reported(stranger, load_tool)
    [line] = commands
    rate = load_yaml(stranger.run / "config.yaml")["ppo"]["learning_rate"]
    words = ["num_envs=16", f"wandb_project={overrides_grammar.quote(name)}", "seed=1"]
    assert shlex.split(line)[2:] == ["task=Cartpole", f"ppo.learning_rate={rate}", *words]
    done = subprocess.run(["bash", "-c", f"echo {line}"], cwd=stranger.here, capture_output=True, text=True, check=True)
    assert "touch" in done.stdout and not (stranger.here / "executed").exists()


def test_error_hint_quotes_file_names(stranger: Stranger, train_here, monkeypatch) -> None:
    monkeypatch.chdir(stranger.here)
    name = "$(touch executed);touch executed;'.pt"
    (stranger.run / "checkpoints" / "last.pt").rename(stranger.run / "checkpoints" / name)
    with pytest.raises(ConfigError) as error:
        find_checkpoint(str(stranger.run))
    advice = str(error.value).partition("try ")[2]
    word = f"checkpoint={stranger.run.relative_to(stranger.here) / 'checkpoints' / name}"
    assert shlex.quote(word) in advice
    subprocess.run(["bash", "-c", f"echo {advice.partition(' (')[0]}"], check=True, capture_output=True)
    assert not (stranger.here / "executed").exists()
    (stranger.run / "checkpoints" / name).rename(stranger.run / "checkpoints" / "x.pt")
    file = stranger.run / "checkpoints" / "x.pt"
    state = {**checkpoint_file.load(file), "task": "Ant; touch executed"}
    checkpoint_file.save(file, {key: value for key, value in state.items() if key not in ("format", "gpusim_rl")})
    done = train_here(f"checkpoint={file}", cwd=stranger.here)
    assert done.returncode == 2 and "Try 'task=Ant; touch executed'" in done.stderr
