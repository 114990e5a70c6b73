"""The estimate of a run's memory against what runs take, and the number of envs it suggests."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import mujoco_warp
import pytest
import torch
from gpusim_rl.tasks.ant import Ant

from gpusim_rl.api import prepare
from gpusim_rl.errors import ConfigError, one_line_if_out_of_memory
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.ppo import PPO
from gpusim_rl.run import memory_estimate
from gpusim_rl.run.memory_estimate import warn_of_learner_memory, warn_of_memory
from gpusim_rl.settings.schema import RunSpec
from gpusim_rl.sim import SimChoice, make_sim
from gpusim_rl.sim.memory import simulator_bytes
from gpusim_rl.sim.warp import peak_bytes
from gpusim_rl.spaces import Box
from helpers.scenes import sim_config
from helpers.training import make_trainer

CPU = torch.device("cpu")
CHOICE = SimChoice("mujoco", CPU, "test")

MANY_CHUNKS = {
    "num_envs": 512,
    "ppo": {"epochs": 1, "horizon": 128, "minibatch_size": 65536, "network": {"hidden": [1024, 1024, 1024]}},
}

MEASURE = """
import json, sys
from gpusim_rl.api import prepare
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.sim.memory import simulator_bytes
from gpusim_rl.run.trainer import Trainer

task, settings, folder = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
log = {"console": "quiet", "dir": folder}
spec = prepare(task, max_iterations=2, log=log, **settings)
run, trainer = spec.cfg, Trainer(spec)
env = trainer.env
estimate = simulator_bytes(env.sim.scene, run.sim, trainer.choice, run.task.decimation)(run.num_envs)
env_spec = EnvSpec(run.num_envs, env.obs_sizes, env.action_space, env.max_episode_length)
estimate += spec.algorithm_class.memory_bytes(run.algorithm, env_spec, trainer.rl_device)
trainer.train()
(peak,) = [int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps([estimate, peak]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("task", "settings"),
    [
        pytest.param("Ant", {"num_envs": 4096, "ppo": {"epochs": 1}}, marks=pytest.mark.slow),
        pytest.param("Ant", {"num_envs": 511}, marks=pytest.mark.slow),  # an MjData per env
        pytest.param("Ant", {"num_envs": 1024}, marks=pytest.mark.slow),
        pytest.param("Ant", {"num_envs": 4096, "ppo": {"network": {"rnn": "lstm"}}}, marks=pytest.mark.slow),
        pytest.param("Ant", {"num_envs": 4096, "ppo": {"precision": "fp32", "horizon": 64}}, marks=pytest.mark.slow),
        pytest.param("Ant", {"num_envs": 64, "sim": "mjwarp"}, marks=pytest.mark.slow),
        pytest.param("Ant", MANY_CHUNKS, marks=pytest.mark.slow),
        ("Cartpole", {"num_envs": 512}),
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


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_iterations(command):
    before, after, _ = memory_of(command, 64, 20, 300)
    assert after - before < 8e6, f"{(after - before) / 300:.0f} B an iteration"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_grows_linearly_with_envs(command):
    sizes = (16384, 65536, 131072)  # far apart: what the allocator keeps differs by 20 MB from run to run
    first, second, third = (memory_of(command, num_envs, 2, 0)[2] for num_envs in sizes)
    few, many = (second - first) / (sizes[1] - sizes[0]), (third - second) / (sizes[2] - sizes[1])
    assert 0.6 < many / few < 1.7, f"{few:.0f} B an env, then {many:.0f} B"  # quadratic growth would make it 2.4


def ant(num_envs: int, **settings: Any) -> RunSpec:
    return prepare("Ant", num_envs=num_envs, ppo={"precision": "bf16", **settings.pop("ppo", {})}, **settings)


def learner_bytes(spec: RunSpec, obs_size: int, device: torch.device) -> float:
    env = EnvSpec(spec.cfg.num_envs, {"policy": obs_size}, Box(8), 1000)
    return PPO.memory_bytes(spec.cfg.algorithm, env, device)


@pytest.fixture(scope="module")
def scene() -> Any:
    return Ant.scene(ant(1).cfg.task)


def warning(caplog: pytest.LogCaptureFixture, *arguments: Any) -> str:
    caplog.clear()
    with caplog.at_level("WARNING", logger="gpusim_rl"):
        warn_of_memory(*arguments)
    assert len(caplog.messages) <= 1
    return "".join(caplog.messages)


def test_the_suggested_number_fits_and_twice_as_many_do_not(monkeypatch, caplog, scene):
    assert warning(caplog, ant(4096), scene, CHOICE, CPU) == ""

    monkeypatch.setattr(memory_estimate, "memory_available_bytes", lambda: 0.62e9)
    said = warning(caplog, ant(2**20), scene, CHOICE, CPU)
    found = re.fullmatch(
        r"num_envs=1048576 probably does not fit: it needs about [\d.e+]+ GB of RAM, 0\.62 GB are free;"
        r" try num_envs=(\d+)",
        said,
    )
    assert found, said
    fits = int(found.group(1))
    assert warning(caplog, ant(fits), scene, CHOICE, CPU) == ""
    assert warning(caplog, ant(2 * fits), scene, CHOICE, CPU) != ""


def test_where_nothing_fits_no_number_is_suggested(monkeypatch, caplog, scene):
    monkeypatch.setattr(memory_estimate, "memory_available_bytes", lambda: 0.1e9)
    assert warning(caplog, ant(4096), scene, CHOICE, CPU).endswith("0.1 GB are free; free some memory")


def test_physics_and_learner_on_two_devices_are_counted_apart(monkeypatch, caplog, scene):
    spec = ant(2**16)
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1.0e9, 2.0e9))
    physics = simulator_bytes(scene, spec.cfg.sim, CHOICE, 2)(spec.cfg.num_envs)
    monkeypatch.setattr(memory_estimate, "memory_available_bytes", lambda: 1.2 * physics)
    assert learner_bytes(spec, 37, cuda) > 0.9e9
    assert "GB on cuda:0, 1 GB are free" in warning(caplog, spec, scene, CHOICE, cuda)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9.0e9, 9.0e9))
    assert warning(caplog, spec, scene, CHOICE, cuda) == ""


def test_the_learner_is_counted_again_when_the_size_of_observations_is_known(tmp_path, monkeypatch, caplog):
    spec = ant(2**16)
    monkeypatch.setattr(memory_estimate, "memory_available_bytes", lambda: 2.0e9)
    for size, fits in ((10, True), (1000, False)):
        caplog.clear()
        with caplog.at_level("WARNING", logger="gpusim_rl"):
            warn_of_learner_memory(spec, EnvSpec(2**16, {"policy": size}, Box(8), 1000), CPU)
        assert ("num_envs=65536 probably does not fit: " in caplog.text) is not fits
    asked: list[EnvSpec] = []
    monkeypatch.setattr(
        "gpusim_rl.run.trainer.warn_of_learner_memory", lambda spec, env, device: asked.append(env) or 8
    )
    make_trainer("Ant", tmp_path)
    assert [(env.obs_sizes, env.action_space) for env in asked] == [({"policy": 60}, Box(8))]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore"),
        RuntimeError("Failed to allocate 17179869184 bytes on device 'cuda:0'"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_an_allocation_that_fails_is_one_line(error):
    message = r"^out of memory with num_envs=4096 .*; try num_envs=2048$"
    with pytest.raises(ConfigError, match=message) as found, one_line_if_out_of_memory(4096):
        raise error
    assert "\n" not in str(found.value)
    with pytest.raises(RuntimeError, match="a bug"), one_line_if_out_of_memory(4096):
        raise RuntimeError("a bug")


def test_every_chunk_of_a_minibatch_has_gradients_of_its_own_on_the_cpu():
    sizes, network = (64 * 4096, 256 * 4096), {"hidden": [512, 512]}
    specs = [ant(65536, ppo={"minibatch_size": size, "network": network, "precision": "fp32"}) for size in sizes]
    few, many = (learner_bytes(spec, 60, CPU) for spec in specs)
    assert many - few == 4 * (256 - 64) * (60 * 512 + 512 * 512)  # activations are those of a chunk for each thread


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("name", ["mjwarp", "newton"])
def test_the_arrays_of_warp_are_those_that_a_simulator_of_many_envs_takes(scene, name, graph):
    if name == "newton":
        pytest.importorskip("newton")
    cfg, choice = sim_config(name=name, graph=graph), SimChoice(name, CPU, "test")
    estimate = simulator_bytes(scene, cfg, choice, 2)

    def step() -> None:
        make_sim(scene, choice, 300, cfg).step(2)

    base = estimate(0) - 0.63e9  # the process with Warp
    assert estimate(300) - estimate(0) + base == pytest.approx(peak_bytes(CPU, step), rel=0.01)


def test_larger_buffers_take_more(scene):
    choice = SimChoice("mjwarp", CPU, "test")
    few, many = (
        simulator_bytes(scene, sim_config(name="mjwarp", njmax=96 * size, nconmax=32 * size), choice, 2)(2**20)
        for size in (1, 20)
    )
    assert 5 < many / few < 20


@pytest.mark.parametrize(("fits", "suggested"), [(64, 64), (4096, 2048), (3000, 2048)])
def test_the_number_that_should_fit_is_suggested(fits, suggested):
    message = rf"^out of memory with num_envs=4096 \(MemoryError\); try num_envs={suggested}$"
    with pytest.raises(ConfigError, match=message), one_line_if_out_of_memory(4096, lambda: fits):
        raise MemoryError


@pytest.mark.parametrize("fails", ["make_data", "step"])
def test_physics_that_finds_no_memory_suggests_what_the_estimate_has_found(tmp_path, monkeypatch, fails):
    def few_envs_only(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("nworld", getattr(args[-1], "nworld", None)) == 512:
            raise RuntimeError("Failed to allocate 17179869184 bytes on device 'cuda:0'")
        return original(*args, **kwargs)

    original = getattr(mujoco_warp, fails)
    monkeypatch.setattr(mujoco_warp, fails, few_envs_only)
    monkeypatch.setattr(memory_estimate, "memory_available_bytes", lambda: 0.715e9)
    message = r"^out of memory with num_envs=512 \(Failed to allocate \d+ bytes on device 'cuda:0'\); try num_envs=128$"
    with pytest.raises(ConfigError, match=message):
        make_trainer("Ant", tmp_path, num_envs=512, sim="mjwarp").train()


def test_an_estimate_that_fails_ends_no_run(scene, monkeypatch):
    def fails(*_: Any) -> Any:
        raise RuntimeError("no such call in this version of Warp")

    monkeypatch.setattr("gpusim_rl.sim.memory.make_sim", fails)
    assert simulator_bytes(scene, sim_config(name="mjwarp"), SimChoice("mjwarp", CPU, "test"), 2)(4096) == 0.0
