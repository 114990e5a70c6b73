"""Budgets for reading untrusted files, one per format. docs/security.md lists their readers."""

from __future__ import annotations

SETTINGS_BYTES = 1 << 20
"""Size of a saved yaml or json; ours have about 10 kB."""
SETTINGS_VALUES = 20_000
"""Values in saved settings; ours have about 200."""
SETTINGS_DEPTH = 50
NUMBER_CHARACTERS = 100
"""Length of a number in a saved yaml; parsing a million digits (`1:59:59:…` is base 60) takes minutes."""
FOLDERS = 20
"""Depth of a run folder."""
METRICS_BYTES = 1 << 30
"""Size of metrics.csv; a million iterations take about 600 MB."""
METRICS_COLUMNS = 4096
"""Columns of metrics.csv; ours have about 60."""
LINE_BYTES = 1 << 20
"""Length of a csv line; 100 columns take about 2 kB."""
COPIED_BYTES = 1 << 30
"""Size of a damaged file that is copied before it is replaced."""
CLIP_BYTES = 256 << 20
"""Size of a motion clip, packed and unpacked; 10 minutes of a humanoid at 50 Hz take 60 MB."""
RESAMPLED_BYTES, RESAMPLED_RATIO = 32 << 20, 10
"""Size of a motion clip at a task's rate; above it, how many times its file's."""
DEMONSTRATIONS_BYTES = 2 << 30
"""Size of demonstrations, packed and unpacked; 10 million control steps of HalfCheetah take 1 GB."""
UNPACKED_BYTES, UNPACKED_RATIO = 64 << 20, 100
"""Size of the arrays of any npz file; above it, how many times the file's."""
DIRECTORY_BYTES = 8 << 20
"""Size of an archive's entry list: about 100,000 entries, for which Python needs 100 MB."""
CHECKPOINT_VALUES = 1_000_000
"""Values in a checkpoint; a large task has about 1,000. Its tensors are bounded by its size."""
XML_BYTES, XML_DEPTH, XML_ELEMENTS = 32 << 20, 200, 100_000
"""Size, nesting and elements of a robot's XML; the largest of 1,384 published files has 4,133."""
XML_FILES, XML_COPIES = 200, 100_000
"""Included files of a robot's XML, and copies by nested `<replicate>`, `<composite>` and `<flexcomp>`."""
ASSET_BYTES, MESH_BYTES = 256 << 20, 64 << 20
"""Size of a mesh, texture or height field; of a mesh read by trimesh."""
ASSET_NUMBERS = 20_000_000
"""Numbers in a height field, texture or custom field, and corners of a mesh's faces."""
ROBOT_BYTES = 2 << 30
"""Memory for reading a robot or compiling its scene; ToddlerBot (65 MB) takes 1.3 GB."""
