# MuJoCo's Python names come from a compiled module without stubs: pyright must not look for them.
from typing import Any

def __getattr__(name: str) -> Any: ...
