"""Turn another project's ONNX policy into an export folder.

gpusim-rl adopt policy.onnx --contract deploy.yaml --robot g1 --out walk     Unitree's files, or your own yaml
gpusim-rl adopt policy.onnx --contract holosoma.whl --robot t1 --out walk    settings in holosoma_inference's wheel
gpusim-rl adopt policy.onnx --robot go1 --out walk                           metadata of mjlab, or a search
gpusim-rl adopt policy.onnx --contract my.yaml --robot my.xml --out w --search    test likely errors of the contract
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
from pathlib import Path

from gpusim_rl.errors import ConfigError, friendly_errors, import_extra, say
from gpusim_rl.machine.hardware import import_torch
from gpusim_rl.options import Parser
from gpusim_rl.view.arguments import check_out


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        adopt(parse(argv))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("adopt", __doc__)
    parser.option("policy", "ONNX file; it is read as data", "Arguments", type=Path, metavar="POLICY.onnx")
    contract = "deploy.yaml, a yaml in our format, or holosoma's wheel"
    parser.option("--contract", contract, "Arguments", "the file's metadata", type=Path, metavar="FILE")
    parser.option("--robot", "g1, t1, go1, go2, or a robot file", "Robot", required=True, metavar="ROBOT")
    parser.option("--search", "also test likely errors of the contract", "Contract", action="store_true")
    parser.option("--out", "a folder", required=True)
    parser.options("--overwrite")
    return parser.parse_args(argv)


def adopt(args: argparse.Namespace) -> Path:
    """Write the export folder, with a corrected contract if the given one does not work; return the folder."""
    for package in ("onnx", "onnxruntime"):
        import_extra(package, "export", "adopt")
    check_out(args.out, overwrite=args.overwrite)
    import_torch()
    from gpusim_rl.deployed.adopt import Body, write_folder
    from gpusim_rl.deployed.contract_formats import known_values, read_contract
    from gpusim_rl.deployed.contract_search import REPORTED, Candidate, ContractSearch, guesses
    from gpusim_rl.deployed.network_file import read_network, sizes_of

    network, body = read_network(args.policy), Body.open(args.robot)
    metadata, (inputs, actions) = {entry.key: entry.value for entry in network.metadata_props}, sizes_of(network)
    contract, search = read_contract(args.contract, metadata, inputs, body), ContractSearch(network, body)
    start = [Candidate(contract)] if contract else guesses(known_values(metadata, body, actions), inputs, body)
    if not start:
        problem = f"no list of observations, and no usual one has {inputs} numbers for {actions} joints"
        raise ConfigError(problem, key=str(args.policy), hint="Try --contract; docs/deploy.md describes the format")
    found = search.evaluate(start)
    if contract is not None:
        say(f"contract as given: {found[0].describe()}")
    best = search.correct(found) if args.search or not found[0].believed else found
    if len(best) > 1:
        say(f"contracts in {search.simulated} simulations, best first:")
        for number, candidate in enumerate(best[:REPORTED], start=1):
            say(f"{number}. {candidate.text}: {candidate.describe()}")
    if not best[0].believed:
        problem = "the robot does not stand and follow commands with any likely contract. Nothing was written"
        raise ConfigError(problem, key=str(args.policy), hint="Try --contract with what the list above lacks")
    chosen = found[0] if found[0].believed else best[0]
    card = write_folder(args.out, network, chosen.contract, body, f"{args.robot} {args.policy.name}")
    if not all(row["measured"] for row in card["observation"]["terms"]):
        say("the policy observes the base's velocity, for which robots have no sensor")
    if "numpy" not in card["files"]:
        say("no policy.npz: the network has operators that policy.py lacks, so it needs onnxruntime")
    say(str(args.out))
    return args.out


if __name__ == "__main__":
    sys.exit(main())
