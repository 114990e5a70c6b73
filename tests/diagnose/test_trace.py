"""Phases, transfers and busy times of traces against hand-computed values."""

from __future__ import annotations

import re

from gpusim_rl.diagnose.trace import name_function, read_events
from gpusim_rl.run.phases import OUTSIDE
from gpusim_rl.testing.sync_counter import CopyTotals, Work
from helpers.trace_events import BACKWARD, DTOD, DTOH, HTOD, call, copy, event, kernel, phase


def us(work: Work) -> tuple[float, float]:
    """Return wall and busy time [us]."""
    return round(work.wall_s * 1e6, 6), round(work.busy_s * 1e6, 6)


def test_eager_work_is_attributed_to_launching_phase():
    read = read_events(
        [
            phase("iteration", 0, 100),
            phase("policy", 0, 40),
            phase("simulate", 40, 60),
            phase("update", 60, 100),
            call("cudaLaunchKernel", 10, 1),
            call("cudaLaunchKernel", 20, 2),
            call("cuLaunchKernel", 45, 3, cat="cuda_driver"),  # by Warp
            call("cudaLaunchKernel", 65, 4, tid=BACKWARD),  # by autograd's thread while the main thread waits
            kernel(15, 25, 1),
            kernel(20, 40, 2, stream=8),  # overlaps the previous one: 25 us busy in total
            kernel(50, 70, 3),  # extends into the update
            kernel(70, 90, 4),
        ]
    ).work
    assert set(read) == {"rollout", "update"}
    # Policy: 0 to 40, busy 15 to 40. Simulation: 40 to the end of its kernel at 70, busy 50 to 70.
    assert us(read["rollout"]) == (70, 25 + 20)
    # The device starts the update after the rollout at 70; the host leaves it at 100.
    assert us(read["update"]) == (30, 20)
    assert all(work.occupied_s == work.busy_s for work in read.values())
    assert (read["rollout"].launches, read["rollout"].kernels) == (3, 3)
    assert (read["update"].launches, read["update"].kernels) == (1, 1)
    assert all(not work.syncs and work.to_device == work.to_host == CopyTotals() for work in read.values())


def test_graph_is_one_launch_of_many_kernels():
    events = [
        phase("iteration", 0, 30),
        phase("rollout", 0, 10),
        phase("update", 10, 20),
        phase("log", 20, 30),
        call("cudaGraphLaunch", 2, 1),
        call("cudaGraphLaunch", 12, 2),
        *(kernel(100 + 10 * i, 110 + 10 * i, 1) for i in range(5)),  # 100 to 150 without a gap
        kernel(120, 145, 1, stream=9),  # a parallel branch of the graph
        copy(DTOD, 150, 155, 1, 4096),  # on the device: no transfer
        *(kernel(160 + 10 * i, 165 + 10 * i, 2) for i in range(4)),  # half of 160 to 200 except the last gap
    ]
    work = read_events(events).work
    assert (work["rollout"].launches, work["rollout"].kernels) == (1, 6)
    assert (work["update"].launches, work["update"].kernels) == (1, 4)
    assert us(work["rollout"]) == (155, 55)  # 0 to 155: the device waited 100 us for its first kernel
    assert us(work["update"]) == (195 - 155, 20)
    # Occupied also while graphs run without records: all of 100 to 155 and 160 to 195.
    assert [round(work[name].occupied_s * 1e6, 6) for name in ("rollout", "update", "log")] == [55, 35, 0]
    assert us(work["log"]) == (0, 0)  # the host finished before the device started
    assert work["rollout"].to_host == work["rollout"].to_device == CopyTotals()


def test_copies_and_waits_are_counted_by_phase():
    reading = read_events(
        [
            phase("iteration", 0, 100),
            phase("rollout", 0, 40),
            phase("log", 50, 100),
            call("cudaMemcpyAsync", 5, 1),
            copy(HTOD, 6, 7, 1, 256),
            call("cudaMemcpyAsync", 8, 2),
            copy(DTOH, 9, 10, 2, 4),
            call("cudaStreamSynchronize", 10, 3),
            call("cudaMemcpy", 20, 4),  # synchronous
            copy(HTOD, 21, 22, 4, 1000),
            call("cudaMemcpyAsync", 45, 5),  # between phases
            copy(HTOD, 46, 47, 5, 8),
            call("cudaMemcpyAsync", 60, 6),
            copy(DTOH, 61, 62, 6, 104),
            call("cudaEventSynchronize", 63, 7),
            call("cudaEventQuery", 64, 8),
            call("cudaStreamWaitEvent", 65, 9),  # the device waits, not the host
        ]
    )
    rollout, log, outside = (reading.work[name] for name in ("rollout", "log", OUTSIDE))
    assert rollout.to_device == CopyTotals(2, 1256) and rollout.to_host == CopyTotals(1, 4)
    assert rollout.syncs == {"cudaStreamSynchronize": 1, "cudaMemcpy": 1}
    assert log.to_host == CopyTotals(1, 104) and log.to_device == CopyTotals()
    assert log.syncs == {"cudaEventSynchronize": 1}
    assert outside.to_device == CopyTotals(1, 8) and not outside.syncs
    assert us(outside) == (10, 1)
    assert sorted((each.phase, each.kind, each.ts) for each in reading.transfers if "Sync" in each.kind) == [
        ("log", "cudaEventSynchronize", 63),
        ("rollout", "cudaStreamSynchronize", 10),
    ]
    assert len(reading.transfers) == 8


def test_events_outside_iterations_are_ignored():
    """The profiler waits for the device when it starts and stops."""
    work = read_events(
        [
            call("cudaDeviceSynchronize", -20, 1),
            call("cudaMemcpyAsync", -10, 2),
            copy(DTOH, 15, 16, 2, 4),  # launched before the iteration
            phase("iteration", 0, 100),
            phase("update", 10, 90),
            call("cudaLaunchKernel", 20, 3),
            kernel(30, 50, 3),
            call("cudaDeviceSynchronize", 110, 4),
            call("cudaLaunchKernel", 120, 5),
            kernel(121, 125, 5),
        ]
    ).work
    assert work["update"].kernels == work["update"].launches == 1 and not work["update"].syncs
    assert us(work["update"]) == (80, 20 + 1)  # busy time counts all work of that time
    assert work[OUTSIDE].kernels == 0 and work[OUTSIDE].to_host == CopyTotals() and not work[OUTSIDE].syncs
    assert us(work[OUTSIDE]) == (20, 0)


def test_device_records_complement_calls():
    """Some driver calls are not recorded, for example Warp's waits and graph launches."""
    work = read_events(
        [
            phase("iteration", 0, 100),
            phase("rollout", 0, 50),
            phase("update", 50, 100),
            call("cudaStreamSynchronize", 10, 1),
            event("cuda_sync", "Stream Sync", 10, 5, correlation=1, cuda_sync_kind="Stream Sync"),  # the same wait
            event("cuda_sync", "Context Sync", 60, 5, correlation=99, cuda_sync_kind="Context Sync"),  # a second wait
            event("cuda_sync", "Stream Wait Event", 70, 1, correlation=98, cuda_sync_kind="Stream Wait Event"),
            call("cudaHostAlloc", 55, 93),
            event("cuda_sync", "Context Sync", 55, 1, correlation=93, cuda_sync_kind="Context Sync"),  # within a call
            call("cudaEventQuery", 80, 94),
            event("cuda_sync", "Event Sync", 80, 1, correlation=94, cuda_sync_kind="Event Sync"),  # no wait
            kernel(20, 30, 97),
            copy(HTOD, 40, 41, 96, 12),
            kernel(500, 510, 95),  # long after all iterations
        ]
    ).work
    assert work["rollout"].syncs == {"cudaStreamSynchronize": 1}
    assert work["update"].syncs == {"Context Sync": 2}
    assert work[OUTSIDE].kernels == 1 and work[OUTSIDE].to_device == CopyTotals(1, 12)
    assert us(work["rollout"]) == (50, 11)


def test_several_iterations_add_up():
    events = []
    for number in range(3):
        begin = 1000.0 * number
        events += [
            phase("iteration", begin, begin + 100),
            phase("update", begin + 10, begin + 100),
            call("cudaLaunchKernel", begin + 20, number),
            kernel(begin + 20, begin + 80, number),
        ]
    work = read_events(events).work
    assert work["update"].kernels == 3 and us(work["update"]) == (270, 180)
    assert us(work[OUTSIDE]) == (30, 0)  # time between iterations belongs to no phase


def test_empty_trace_has_no_phases():
    assert read_events([]).work == {} and read_events([call("cudaStreamSynchronize", 1, 1)]).work == {}


def test_transfers_name_innermost_function_outside_library():
    events = [
        phase("iteration", 0, 100),
        call("cudaStreamSynchronize", 50, 1),
        event("python_function", "train.py(1): <module>", 0, 100),
        event("python_function", "tasks/ant.py(88): rewards", 40, 20),
        event("python_function", "torch/_tensor.py(30): wrapped", 45, 10),
        event("python_function", "other.py(5): parallel", 45, 10, tid=BACKWARD),
        event("python_function", "before.py(5): finished", 20, 10),
        event("python_function", "<built-in method item>", 49, 5),
    ]
    [transfer] = read_events(events).transfers
    assert name_function(events, transfer, re.compile(r"^torch/")) == "tasks/ant.py:88 (in rewards)"
    assert name_function([], transfer, re.compile(r"^torch/")) is None
