"""Tests of safe file access and of plain settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpusim_rl.errors import ConfigError
from gpusim_rl.files.safe_open import check_plain, dump_yaml, load_yaml, open_file, read_bytes, replacing


def test_links_pipes_and_folders_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    for mode in ("rb", "ab", "ab+"):
        for name, words in (("link", "is a link to"), ("pipe", "is a named pipe"), ("", "is a folder")):
            with pytest.raises((ConfigError, IsADirectoryError), match=words if name else None):
                open_file(tmp_path / name, mode)
    with pytest.raises(ConfigError, match="more than 0 bytes"):
        read_bytes(tmp_path / "real", 0)


def test_replacing_a_link_keeps_its_target(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with replacing(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "real").read_text() == "x" and (tmp_path / "link").read_bytes() == b"new"
    assert not (tmp_path / "link").is_symlink()


def test_hard_linked_file_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("all I have\n")
    (tmp_path / "train.log").hardlink_to(tmp_path / "mine")
    assert open_file(tmp_path / "train.log").read() == b"all I have\n"
    with pytest.raises(ConfigError, match="hard link"):
        open_file(tmp_path / "train.log", "ab")


def test_overlong_yaml_number_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"seed: 1{':59' * 1000}\n")
    with pytest.raises(ConfigError, match=r"line 1: .*3001 characters"):
        load_yaml(tmp_path / "config.yaml")


@pytest.mark.parametrize("value", [{"a": {1, 2}}, {"a": yaml.safe_load("2020-01-01")}, [b"x"], {("a",): 1}])
def test_non_plain_settings_are_rejected(value: Any) -> None:
    with pytest.raises(ConfigError, match="a number or string"):
        check_plain(value, "config.yaml")


def test_settings_round_trip_through_yaml(tmp_path: Path) -> None:
    twice = [0.5, {"x": 1}]  # a caller from Python may pass one list for two settings
    value = {"a": [1, 2.5, None, True, "x: y", "\x1b", "Größe"], "b": {"c": {}}, "1": "2020-01-01", "d": [twice, twice]}
    (tmp_path / "config.yaml").write_bytes(dump_yaml(value))
    assert load_yaml(tmp_path / "config.yaml") == value
