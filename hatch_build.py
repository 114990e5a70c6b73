"""Build hook: MuJoCo for browsers in the wheel, for `gpusim-rl share`, which otherwise downloads it on first use."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BrowserMujocoHook(BuildHookInterface):
    """Download the files and add them to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files to a wheel that is not an editable install."""
        if self.target_name != "wheel" or version == "editable":
            return
        package = Path(self.root, "gpusim_rl", "deployed")
        module = runpy.run_path(str(package / "browser_mujoco.py"))
        try:
            module["bring"]()
        except OSError as error:
            self.app.display_warning(f"the wheel lacks MuJoCo for browsers, which gpusim-rl share needs: {error}")
            return
        for file in module["FILES"].values():
            build_data["force_include"][str(file)] = f"gpusim_rl/deployed/page/{file.name}"
