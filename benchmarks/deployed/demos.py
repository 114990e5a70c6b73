"""Collect results of `gpusim-rl stress` on exports of legged robots' demos; write demos.json.

    gpusim-rl stress go1 && gpusim-rl stress g1 && python benchmarks/deployed/demos.py Go1Velocity=go1 G1Velocity=g1

Per demo: the smallest push from behind and each 45 degrees counter-clockwise, and the smallest of all [m/s]; the
smallest size of each other disturbance (null: none felled the robot); falls and episodes of each rate.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from gpusim_rl.files.safe_open import load_json
from measuring.checkout import provenance, write


def row(folder: Path) -> dict[str, Any]:
    """Return the results in a folder's stress.json."""
    results = load_json(folder / "stress.json")
    pushes = [each["smallest"] for each in results["searches"] if each["kind"] == "push"]
    others = [each for each in results["searches"] if each["kind"] != "push"]
    return {
        "pushes": pushes,
        "push": min(size for size in pushes if size is not None),
        "others": {each["label"]: [each["smallest"], each["unit"]] for each in others},
        "falls": {each["name"]: [each["falls"], each["episodes"]] for each in results["rates"]},
        "seed": results["seed"],
    }


def main() -> None:
    """Collect the rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exports", nargs="+", metavar="NAME=FOLDER")
    pairs = (text.partition("=") for text in parser.parse_args().exports)
    out = Path(__file__).with_suffix(".json")
    rows = {name: row(Path(folder)) for name, _, folder in pairs}
    write(out, json.dumps({"demos": rows, **provenance(out)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
