"""Compile the C file of an export, compare it with TorchScript and time it; write c_policy.json.

    gpusim-rl export Go1Velocity --c --out go1 && python benchmarks/deployed/c_policy.py go1

`max_error`: of 10,000 observations, relative for values above 1. `us`: median of `calls` calls of `policy_network`, on
one core [us], with the call's own overhead from Python.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from gpusim_rl.files.safe_open import load_json
from measuring.checkout import provenance, write

COMMAND = ("cc", "-std=c99", "-O2", "-shared", "-fPIC")
OBSERVATIONS, CALLS = 10_000, 5_000


def main() -> None:
    """Compile, compare, time and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path)
    folder = parser.parse_args().export
    card, pointer = load_json(folder / "policy.json"), ctypes.POINTER(ctypes.c_float)
    obs = np.random.default_rng(0).normal(0.0, 3.0, (OBSERVATIONS, card["observation"]["size"])).astype(np.float32)
    with torch.no_grad():
        expected = torch.cat(torch.jit.load(folder / "policy.ts")(torch.from_numpy(obs)), dim=1).numpy()
    got = np.zeros_like(expected)
    with tempfile.TemporaryDirectory() as temporary:
        library = f"{temporary}/policy.so"
        subprocess.run([*COMMAND, str(folder / "policy.c"), "-o", library, "-lm"], check=True)
        network = ctypes.CDLL(library).policy_network
        for x, y in zip(obs, got, strict=True):
            network(x.ctypes.data_as(pointer), y.ctypes.data_as(pointer))
        one = obs[0].ctypes.data_as(pointer), got[0].ctypes.data_as(pointer)
        times = timeit.repeat(lambda: network(*one), number=1, repeat=CALLS)
    compiler = subprocess.run(["cc", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    row = {
        "task": card["task"],
        "inputs": obs.shape[1],
        "max_error": float((np.abs(got - expected) / np.maximum(1.0, np.abs(expected))).max()),
        "us": round(1e6 * statistics.median(times), 1),
        "calls": CALLS,
        "compiler": " ".join([*COMMAND, "#", compiler]),
    }
    print(row)
    out = Path(__file__).with_suffix(".json")
    write(out, json.dumps({**row, **provenance(out)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
