"""Adopt walking policies of other projects, and search for errors planted in their contracts; write strangers.json.

    python benchmarks/deployed/strangers.py --unitree unitree_rl_lab/deploy/robots/g1_29dof/config/policy/velocity/v0

`policies`: seconds upright in 10 s, at command 0 and at 0.5 m/s, and mean forward speed in the last 7 s of the latter
(null: fell). `plants`: one error per row ('': none), of a kind that the search can correct. `named`: the three best
contracts. `ok`: the best one corrects the planted part and no other. `restored`: it equals the original. History errors
are planted in a network with 5 frames per term that uses the newest. `complete`: false after an interrupted run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from gpusim_rl.deployed import adopt, contract_formats, network_file
from gpusim_rl.deployed.contract import Contract
from gpusim_rl.deployed.contract_search import REPORTED, Candidate, ContractSearch, corrections
from gpusim_rl.deployed.walkers import Walkers
from measuring.checkout import provenance, write

SPEED, SECONDS, MEASURED, FRAMES = 0.5, 10, 7, 5
PLANTS = {  # errors by policy, in the words of `corrections`
    "unitree_g1": "joints and their values breadth first; base_ang_vel_world in place of base_ang_vel; "
    "action scale 1.0; pose of action 0 zero; history in the other direction; history by frames",
    "ppo_g1": "joints alphabetical; joint_vel scale 1.0; pose zero; phase {'standing': None}; "
    "history in the other direction",
    "fastsac_g1": "terms as in Isaac Lab; base_ang_vel scale 1.0; control rate 100 Hz",
    "ppo_t1": "projected_gravity negated; cos_phase and sin_phase exchanged; control rate 200 Hz",
    "fastsac_t1": "pose zero; phase {'period': 0.5}",
}


def walk(folder: Path) -> dict[str, Any]:
    """Simulate one robot at command 0 and one at `SPEED`; return seconds upright and mean speed."""
    walkers, active, upright, speeds = Walkers(folder, 2), np.ones(2, bool), np.zeros(2), list[float]()
    standing, hz, walkers.command[1, 0] = walkers.height.copy(), walkers.control_hz, SPEED
    for _ in range(round(SECONDS * hz)):
        walkers.step(active)
        active &= ~walkers.fallen(standing)
        upright += active / hz
        speeds.append(walkers.velocity[1, 0])
    speed = round(float(np.mean(speeds[-round(MEASURED * hz) :])), 3) if active[1] else None
    return {**dict(zip(("stands_s", "walks_s"), upright.round(2).tolist(), strict=True)), "speed": speed}


def with_history(network: ModelProto, contract: Contract) -> tuple[ModelProto, Contract]:
    """Return a network that takes `FRAMES` frames per term, oldest first, and uses the newest; and its contract."""
    sizes = [contract.size_of(term.kind) for term in contract.terms]
    ends, graph = FRAMES * np.cumsum(sizes), (network := ModelProto.FromString(network.SerializeToString())).graph
    newest = np.concatenate([np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)])
    graph.node.insert(0, helper.make_node("Gather", ["frames", "newest"], [graph.input[0].name], axis=1))
    graph.initializer.append(numpy_helper.from_array(newest, "newest"))
    graph.input[0].name, graph.input[0].type.tensor_type.shape.dim[1].dim_value = "frames", int(ends[-1])
    return network, replace(contract, terms=tuple(replace(term, history=FRAMES) for term in contract.terms))


def search_row(network: ModelProto, contract: Contract, body: adopt.Body, error: str) -> dict[str, Any]:
    """Plant an error and search; return a row of `plants`."""
    network, contract = with_history(network, contract) if "history" in error else (network, contract)
    change = {change.text: change for change in corrections(contract, body)}[error] if error else None
    began, search = time.process_time(), ContractSearch(network, body)
    best = search.correct(search.evaluate([Candidate(replace(contract, **change.values) if change else contract)]))
    named, cpu_s = [f"{c.text}: {c.describe()}" for c in best[:REPORTED]], round(time.process_time() - began, 1)
    row = {"planted": change and change.part, "error": error, "named": named, "cpu_s": cpu_s}
    ok = [each.part for each in best[0].changes] == ([change.part] if change else [])
    return {**row, "simulations": search.simulated, "ok": ok, "restored": best[0].contract == contract}


def main() -> None:
    """Test policies and plants; write the results after each policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", default="holosoma-inference==0.1.3", help="file (default: get %(default)s with pip)")
    parser.add_argument("--unitree", type=Path, required=True, help="folder with `exported` and `params`")
    args, out = parser.parse_args(), Path(__file__).with_suffix(".json")
    report: dict[str, Any] = {**provenance(out), "policies": {}, "plants": []}
    report["environment"]["command"] = "python benchmarks/deployed/strangers.py --unitree FOLDER"
    with tempfile.TemporaryDirectory() as name:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", name, args.wheel]
        subprocess.run(pip, check=True)
        files = {file.stem.removesuffix("_29dof"): file for file in Path(name).rglob("*.onnx")}
        files["unitree_g1"] = args.unitree / "exported/policy.onnx"
        for policy, errors in PLANTS.items():
            network, body = network_file.read_network(files[policy]), adopt.Body.open(policy[-2:])
            metadata = {entry.key: entry.value for entry in network.metadata_props}
            given = args.unitree / "params/deploy.yaml" if policy == "unitree_g1" else Path(name)
            contract = contract_formats.read_contract(given, metadata, network_file.sizes_of(network)[0], body)
            assert contract is not None
            adopt.write_folder(Path(name, policy), network, contract, body, files[policy].name)
            report["policies"][policy] = walk(Path(name, policy))
            for error in ("", *errors.split("; ")):
                report["plants"].append({"policy": policy, **search_row(network, contract, body, error)})
            report["complete"] = [*report["policies"]] == [*PLANTS]
            write(out, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
