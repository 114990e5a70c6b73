"""Cache of our yaml files: Hydra reads a dozen per config, with a pure Python parser."""

from __future__ import annotations

import pickle
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

CFG = Path(__file__).resolve().parents[2] / "cfg"


def keep() -> None:
    load, kept = OmegaConf.load, cache(lambda path: pickle.dumps(load(path)))

    def kept_load(file: Any) -> Any:
        path = Path(getattr(file, "name", file))
        return pickle.loads(kept(path)) if CFG in path.parents else load(file)

    OmegaConf.load = staticmethod(kept_load)
    for path in CFG.rglob("*.yaml"):
        kept(path)
