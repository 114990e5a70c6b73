"""The run as a whole: exact resume, kills, signals, bad input, full disks, and what the loop must survive."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from gpusim_rl.run import checkpoint
from gpusim_rl.run.trainer import Trainer
from training import Faulty, differences, make_trainer, merged, read_csv, the_run

# What two runs of the same training may differ in.
OF_THE_CALL = ("/elapsed_s", "/wandb_id", "/config/checkpoint", "/config/log/dir", "/overrides")


def stop_at(trainer: Trainer, iteration: int, number: int = signal.SIGTERM) -> None:
    """Let a signal arrive during an iteration."""
    update = trainer.ppo.update

    def interrupted(*args: Any) -> Any:
        if trainer.iteration + 1 == iteration:
            signal.raise_signal(number)
        return update(*args)

    trainer.ppo.update = interrupted  # type: ignore[method-assign]


def final_state(folder: Path) -> dict[str, Any]:
    return checkpoint.load(the_run(folder) / "checkpoints" / "last.pt")


def assert_same_run(whole: Path, resumed: Path) -> None:
    different = differences(final_state(whole), final_state(resumed))
    assert [path for path in different if not path.startswith(OF_THE_CALL)] == []
    assert read_csv(the_run(whole)) == read_csv(the_run(resumed))


# Resume is exact

RECURRENT = {"ppo": {"network": {"rnn": "lstm"}, "sequence_length": 4}}
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Cartpole": ("Cartpole", {}),
    "Cartpole, float32, linear schedule": ("Cartpole", {"ppo": {"precision": "fp32", "schedule": "linear"}}),
    "Cartpole, one batch for all worlds": ("Cartpole", {"sim": {"persistent": False}}),
    "Cartpole, lstm": ("Cartpole", RECURRENT),
    "Cartpole, episodes shorter than the horizon": ("Cartpole", {"task": {"episode_length": 3}}),
    "Cartpole, rows and checkpoints out of step": ("Cartpole", {"log": {"interval": 2}}),
    "asymmetric critic, gru": (
        Faulty,
        merged(RECURRENT, {"task": {"critic": True}, "ppo": {"network": {"rnn": "gru"}}}),
    ),
    "Ant": ("Ant", {}),
    "Ant, one batch for all worlds": ("Ant", {"num_envs": 3, "sim": {"persistent": False}}),
}


@pytest.mark.parametrize("name", RUNS)
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, name):
    task, settings = RUNS[name]
    half = 10 if name in ("Cartpole", "Cartpole, lstm") else 3
    settings = merged({"max_iterations": 2 * half}, settings)
    make_trainer(task, tmp_path / "whole", **settings).train()

    stopped = make_trainer(task, tmp_path / "resumed", **settings)
    stop_at(stopped, half)
    with pytest.raises(SystemExit) as end:
        stopped.train()
    assert end.value.code == 143 and stopped.iteration == half
    torch.manual_seed(0)  # the seed of another process
    resumed = make_trainer(task, tmp_path / "resumed", checkpoint=str(the_run(tmp_path / "resumed")), **settings)
    assert resumed.iteration == half
    resumed.train()

    assert resumed.iteration == 2 * half and resumed.env_steps == 2 * half * 8 * resumed.cfg.num_envs
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
