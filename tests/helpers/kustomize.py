"""`kubectl kustomize` of our overlays, limited to resources and component images. A test compares the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def render(folder: Path) -> list[dict[str, Any]]:
    """Return the objects of an overlay, with the image that a user's cluster would pull."""
    settings = yaml.safe_load((folder / "kustomization.yaml").read_text())
    objects: list[dict[str, Any]] = []
    for name in settings["resources"]:
        path = folder / name
        objects += render(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for name in settings.get("components", []):
        for image in yaml.safe_load((folder / name / "kustomization.yaml").read_text())["images"]:
            _set_image(objects, image["name"], f"{image['newName']}:{image['newTag']}")
    return objects


def _set_image(node: Any, old: str, new: str) -> None:
    if isinstance(node, dict) and node.get("image") == old:
        node["image"] = new
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _set_image(child, old, new)
