"""The journal of a study: a file with a record of Optuna's in each line, read as data whoever wrote it.

Optuna's own reader follows links, is ended by half a line, and takes attributes of any type.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from gpusim_rl.errors import ConfigError, import_extra, warn
from gpusim_rl.files.budgets import LINE_BYTES
from gpusim_rl.files.safe_open import open_file

MAX_TAIL = 1 << 16
"""Bytes that are looked at for the last line; ours have some hundred."""
COMPLETE, PRUNED, FAIL = 1, 2, 3
"""States of trials. We let none wait (4): Optuna would run it with the settings that its record has."""
ATTRIBUTES = {"number": int, "run": str, "failed": str, "interrupted": bool}
"""Types of the attributes of a trial that are read."""


class Journal:
    """What `optuna.storages.JournalStorage` asks of a file. Several processes may append to it.

    Making one cuts off the last line where a kill or a full disk has torn it.

    Raises:
        ConfigError: The file is none, or in another place than its end is a line that no search writes.
        OSError: It cannot be written.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._optuna: Any = import_extra("optuna", "tune", "tools/tune.py")
        self._begins = [0]  # place of each record that was read, and of the next one
        self._warned = False
        self.append_logs([])

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yields the records from a number on, up to one that is being written."""
        del self._begins[log_number_from + 1 :]
        with open_file(self._file) as file:
            file.seek(self._begins[-1])
            while (line := file.readline(LINE_BYTES)).endswith(b"\n") or len(line) == LINE_BYTES:
                record = _parsed(line)
                if not self._is_ours(record):
                    where = f"{self._file}: line {len(self._begins)} is "
                    problem = "damaged" if record is None else "not a record that a search writes"
                    raise ConfigError(f"{where}{problem}. Try removing the line, or study=<another name>")
                self._begins.append(file.tell())
                yield record

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Appends records, all of them or none, behind the last whole one."""
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        with open_file(self._file, "ab+", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)  # that of a process that was killed is free
            except OSError as error:
                if not self._warned:
                    warn(f"{self._file} cannot be locked ({error.strerror}): only one process may search there")
                self._warned = True
            end = _cut(file)
            try:
                while text:  # a disk that is nearly full takes a part
                    text = text[file.write(text) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise

    def _is_ours(self, record: Any) -> bool:
        """Whether a search writes such a record."""
        with suppress(KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError):
            if type(record["worker_id"]) is not str:
                return False
            match record:
                case {"op_code": 0, "study_name": str(), "directions": [2]}:
                    return True
                case {"op_code": 2, "study_id": study, "user_attr": {**attributes}}:
                    return _is_count(study) and len(attributes) == 1 and type(attributes.get("search", {})) is dict
                case {"op_code": 4, "study_id": study, "datetime_start": start}:
                    return _is_count(study) and (start is None or _is_time(start)) and self._is_trial(record)
                case {"op_code": 5, "param_name": str() as name, "param_value_internal": value, "distribution": text}:
                    return _is_count(record["trial_id"]) and self._are_settings({name: value}, {name: text})
                case {"op_code": 6, "state": state, "values": values, "datetime_complete": end}:
                    [value] = [None] if values is None else values
                    return _is_count(record["trial_id"]) and _is_time(end) and _is_end(state, value)
                case {"op_code": 7, "step": step, "intermediate_value": value}:
                    return _is_count(record["trial_id"]) and _is_count(step) and _is_number(value)
                case {"op_code": 8, "user_attr": {**attributes}}:
                    return _is_count(record["trial_id"]) and len(attributes) == 1 and _are_attributes(attributes)
                case {"op_code": 9, "system_attr": {**rungs}}:  # of hyperband
                    return _is_count(record["trial_id"]) and len(rungs) == 1 and all(map(_is_number, rungs.values()))
        return False

    def _is_trial(self, record: Mapping[str, Any]) -> bool:
        """Whether a trial has just begun, or was added when it had ended."""
        values = record.get("intermediate_values", {})
        return (
            self._are_settings(record.get("params", {}), record.get("distributions", {}))
            and _are_attributes(record.get("user_attrs", {}))
            and all(map(_is_number, [*values.values(), *record.get("system_attrs", {}).values()]))
            and all(_is_count(int(step)) for step in values)
            and record.get("values") is None
            and ("datetime_complete" not in record or _is_time(record["datetime_complete"]))
            and ("state" not in record or _is_end(record["state"], record.get("value")))
        )

    def _are_settings(self, values: Mapping[str, Any], distributions: Mapping[str, str]) -> bool:
        """Whether all values are within their distributions."""
        for name, value in values.items():
            allowed = self._optuna.distributions.json_to_distribution(distributions[name])
            if hasattr(allowed, "choices"):
                if not (_is_count(value) and value < len(allowed.choices)):
                    return False
            elif not (_is_number(value) and allowed.low <= value <= allowed.high):
                return False
        return values.keys() == distributions.keys()


def _cut(file: IO[bytes]) -> int:
    """Cuts off a last line that is not whole; returns the size of the file. It is locked."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_TAIL))
    tail = file.read(MAX_TAIL)
    line = tail[tail.rfind(b"\n", 0, -1) + 1 :]
    whole = line.endswith(b"\n") and isinstance(_parsed(line), dict)
    if not whole and len(line) < MAX_TAIL:  # a longer one is none of ours, which the reader refuses
        file.truncate(size := size - len(line))
    return size


def _parsed(line: bytes) -> Any:
    """Returns the value of a line of JSON; None where it is none."""
    with suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_time(value: Any) -> bool:
    datetime.fromisoformat(value).astimezone()
    return True


def _is_end(state: Any, value: Any) -> bool:
    return state in (COMPLETE, PRUNED, FAIL) and (_is_number(value) or (value is None and state != COMPLETE))


def _are_attributes(attributes: Mapping[str, Any]) -> bool:
    return all(type(value) is ATTRIBUTES.get(name, type(value)) for name, value in attributes.items()) and _is_count(
        attributes.get("number", 0)
    )
