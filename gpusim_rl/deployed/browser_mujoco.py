"""MuJoCo's official build for browsers, from npm, for `gpusim-rl share`.

    python gpusim_rl/deployed/browser_mujoco.py    download it into this package, as the build of a wheel does

The files are not in git. This module imports only the standard library: hatch_build.py runs it at build time.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

VERSION = "3.14.0"
SHA256 = "f845a07ab81303cc6579fec07136818bed21d44a31c1911340f61e06f4d11eee"  # of npm's archive
FOLDER = Path(__file__).with_name("page")
FILES = {"mujoco.js": FOLDER / f"mujoco-{VERSION}.js.gz", "mujoco.wasm": FOLDER / f"mujoco-{VERSION}.wasm.gz"}
TIMEOUT_S = 300


def bring() -> None:
    """Download the files that are missing; raise OSError if that is not possible, or if they are not the known ones."""
    if all(file.is_file() for file in FILES.values()):
        return
    npm = shutil.which("npm")
    if npm is None:
        raise OSError("npm, which downloads it, is not installed")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", "--ignore-scripts", "--fetch-retries=1", f"@mujoco/mujoco@{VERSION}"]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise OSError(f"npm pack did not finish within {TIMEOUT_S} s") from None
        archives = list(Path(folder).glob("*.tgz"))
        if done.returncode or not archives:
            raise OSError(f"npm pack failed: {(done.stderr.strip() or 'no output').splitlines()[0]}")
        content = archives[0].read_bytes()
    if (digest := hashlib.sha256(content).hexdigest()) != SHA256:
        raise OSError(f"@mujoco/mujoco {VERSION} has the SHA-256 {digest}, expected {SHA256}")
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for name, file in FILES.items():
            member = archive.extractfile(f"package/{name}")
            assert member is not None
            temporary = file.with_suffix(".part")
            temporary.write_bytes(gzip.compress(member.read(), mtime=0))
            temporary.replace(file)


if __name__ == "__main__":
    bring()
