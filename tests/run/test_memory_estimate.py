"""The estimate of a run's memory against what runs take, and the number of envs it suggests."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch
from gpusim_rl.tasks.ant import Ant

from gpusim_rl.api import prepare
from gpusim_rl.config import RunConfig
from gpusim_rl.errors import ConfigError
from gpusim_rl.run import memory
from gpusim_rl.run.memory_estimate import check_learner_memory, check_memory, learner_bytes, simulator_bytes
from gpusim_rl.sim import SimChoice
from helpers.training import make_trainer

CPU = torch.device("cpu")

MANY_CHUNKS = {
    "num_envs": 512,
    "ppo": {"epochs": 1, "horizon": 128, "minibatch_size": 65536, "network": {"hidden": [1024, 1024, 1024]}},
}

MEASURE = """
import json, sys
from gpusim_rl.api import prepare
from gpusim_rl.run.memory_estimate import learner_bytes, simulator_bytes
from gpusim_rl.run.trainer import Trainer

task, settings, folder = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
log = {"console": "quiet", "dir": folder}
run, task_class, config, lines = prepare(task, max_iterations=2, log=log, **settings)
trainer = Trainer(run, task_class, config=config, overrides=lines)
env = trainer.env
estimate = simulator_bytes(env.sim.scene.model, run.sim, trainer.choice, run.num_envs)
obs_size = sum(env.obs_sizes.values())
estimate += learner_bytes(
    run, obs_size, env.num_actions, run.num_envs, trainer.rl_device, bf16=trainer.algorithm.policy.bf16
)
trainer.train()
(peak,) = [int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps([estimate, peak]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ("Ant", {"num_envs": 4096, "ppo": {"epochs": 1}}),
        ("Ant", {"num_envs": 511}),  # an MjData per env
        pytest.param("Ant", {"num_envs": 1024}, marks=pytest.mark.slow),
        pytest.param("Ant", {"num_envs": 4096, "ppo": {"network": {"rnn": "lstm"}}}, marks=pytest.mark.slow),
        pytest.param("Ant", {"num_envs": 4096, "ppo": {"precision": "fp32", "horizon": 64}}, marks=pytest.mark.slow),
        pytest.param("Ant", {"num_envs": 64, "sim": "mjwarp"}, marks=pytest.mark.slow),
        pytest.param("Ant", MANY_CHUNKS, marks=pytest.mark.slow),
        pytest.param("Cartpole", {"num_envs": 512}, marks=pytest.mark.slow),
        pytest.param("Cartpole", {"num_envs": 65536}, marks=pytest.mark.slow),
    ],
)
def test_the_estimate_is_near_what_a_run_takes(command, tmp_path, task, settings):
    done = command(sys.executable, "-c", MEASURE, task, json.dumps(settings), str(tmp_path))
    estimate, peak = json.loads(done.stdout.splitlines()[-1])
    assert 0.8 < estimate / peak < 1.6, f"estimated {estimate / 1e6:.0f} MB, took {peak / 1e6:.0f} MB"


LONG_RUN = """
import sys
from gpusim_rl.api import scratch_training

def used(key):
    (kilobytes,) = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)]
    return kilobytes * 1024

envs, warm_up, iterations = map(int, sys.argv[1:])
small = ["ppo.minibatch_size=4096", "ppo.epochs=1"]
with scratch_training(["task=Cartpole", f"num_envs={envs}", *small]) as (trainer, log):
    for _ in range(warm_up):
        trainer.iterate(log)
    before = used("VmRSS")
    for _ in range(iterations):
        trainer.iterate(log)
    print(before, used("VmRSS"), used("VmHWM"))
"""


def memory_of(command, num_envs: int, warm_up: int, iterations: int) -> list[int]:
    """Resident memory after the warm-up, at the end, and its peak [B]."""
    done = command(sys.executable, "-c", LONG_RUN, str(num_envs), str(warm_up), str(iterations))
    return [int(number) for number in done.stdout.split()[-3:]]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_iterations(command):
    before, after, _ = memory_of(command, 64, 20, 300)
    assert after - before < 8e6, f"{(after - before) / 300:.0f} B an iteration"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_grows_linearly_with_worlds(command):
    sizes = (16384, 65536, 131072)  # far apart: what the allocator keeps differs by 20 MB from run to run
    first, second, third = (memory_of(command, num_envs, 2, 0)[2] for num_envs in sizes)
    few, many = (second - first) / (sizes[1] - sizes[0]), (third - second) / (sizes[2] - sizes[1])
    assert 0.6 < many / few < 1.7, f"{few:.0f} B an env, then {many:.0f} B"  # quadratic growth would make it 2.4


def ant(num_envs: int, **settings: Any) -> tuple[RunConfig, Any]:
    run = prepare("Ant", num_envs=num_envs, **settings)[0]
    return run, Ant.scene(run.task).model


def test_the_suggested_number_fits_and_twice_as_many_do_not(monkeypatch):
    _, model = ant(4096)
    choice = SimChoice("mujoco", CPU, "test")
    check_memory(model, ant(4096)[0], choice, CPU, bf16=True)

    monkeypatch.setattr(memory, "memory_available_bytes", lambda: 0.62e9)
    with pytest.raises(ConfigError) as error:
        check_memory(model, ant(2**20)[0], choice, CPU, bf16=True)
    found = re.fullmatch(
        r"num_envs=1048576 does not fit: it needs about [\d.]+ GB of RAM, 0\.62 GB are free; try num_envs=(\d+)",
        str(error.value),
    )
    assert found, error.value
    fits = int(found.group(1))
    check_memory(model, ant(fits)[0], choice, CPU, bf16=True)
    with pytest.raises(ConfigError):
        check_memory(model, ant(2 * fits)[0], choice, CPU, bf16=True)


def test_where_nothing_fits_no_number_is_suggested(monkeypatch):
    run, model = ant(4096)
    monkeypatch.setattr(memory, "memory_available_bytes", lambda: 0.1e9)
    with pytest.raises(ConfigError, match=r"0\.1 GB are free; free some memory$"):
        check_memory(model, run, SimChoice("mujoco", CPU, "test"), CPU, bf16=True)


def test_physics_and_learner_on_two_devices_are_counted_apart(monkeypatch):
    run, model = ant(2**16)
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1.0e9, 2.0e9))
    physics = simulator_bytes(model, run.sim, SimChoice("mujoco", CPU, "test"), run.num_envs)
    monkeypatch.setattr(memory, "memory_available_bytes", lambda: 1.2 * physics)
    assert learner_bytes(run, 37, 8, run.num_envs, cuda, bf16=True) > 0.9e9
    with pytest.raises(ConfigError, match="GB on cuda:0, 1 GB are free"):
        check_memory(model, run, SimChoice("mujoco", CPU, "test"), cuda, bf16=True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9.0e9, 9.0e9))
    check_memory(model, run, SimChoice("mujoco", CPU, "test"), cuda, bf16=True)


def test_observations_larger_than_the_state_are_counted_when_they_are_known(tmp_path, monkeypatch):
    run, _ = ant(2**16)
    with monkeypatch.context() as little:
        little.setattr(memory, "memory_available_bytes", lambda: 2.0e9)
        check_learner_memory(run, 10, 8, CPU, bf16=True)
        with pytest.raises(ConfigError, match="num_envs=65536 does not fit: "):
            check_learner_memory(run, 1000, 8, CPU, bf16=True)
    asked = []
    monkeypatch.setattr("gpusim_rl.run.trainer.check_learner_memory", lambda *a, **k: asked.append(a[1:3]))
    make_trainer("Ant", tmp_path)
    assert asked == [(60, 8)]


def test_every_chunk_of_a_minibatch_has_gradients_of_its_own_on_the_cpu():
    sizes, network = (64 * 4096, 256 * 4096), {"hidden": [512, 512]}
    runs = [ant(65536, ppo={"minibatch_size": size, "network": network})[0] for size in sizes]
    few, many = (learner_bytes(run, 60, 8, run.num_envs, CPU, bf16=False) for run in runs)
    assert many - few == 4 * (256 - 64) * (60 * 512 + 512 * 512)  # activations are those of a chunk for each thread


def test_mjwarp_counts_its_buffers():
    run, model = ant(4096, sim={"nconmax": 640, "njmax": 1920})
    choice = SimChoice("mjwarp", CPU, "test")
    few, many = (simulator_bytes(model, cfg.sim, choice, 2**20) for cfg in (ant(4096)[0], run))
    assert 10 < many / few < 20
