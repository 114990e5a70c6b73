"""Budgets of files that may be a stranger's: what reading one may take, whatever the file says of itself.

One budget per format. docs/security.md lists which reader uses which.
"""

from __future__ import annotations

SETTINGS_BYTES = 1 << 20
"""Size of a saved yaml or json; ours have some 10 kB."""
SETTINGS_VALUES = 20_000
"""Values in saved settings; ours have some 200."""
SETTINGS_DEPTH = 50
NUMBER_CHARACTERS = 100
"""Length of a number in a saved yaml: one of a million, `1:59:59:…` in base 60, takes minutes to read."""
FOLDERS = 20
"""Depth of folders in a run folder."""
METRICS_BYTES = 1 << 30
"""Size of metrics.csv; one of a million iterations has some 600 MB."""
METRICS_COLUMNS = 4096
"""Columns of metrics.csv; ours have some 60."""
LINE_BYTES = 1 << 20
"""Length of a line of a csv file; one of 100 columns has some 2 kB."""
COPIED_BYTES = 1 << 30
"""Size of a damaged file that is copied before it is replaced."""
CLIP_BYTES = 256 << 20
"""Size of a motion clip, packed and unpacked; 10 minutes of a humanoid at 50 Hz have 60 MB."""
RESAMPLED_BYTES, RESAMPLED_RATIO = 32 << 20, 10
"""Size of a motion clip at the rate of a task, and how many times that of its file it may be beyond it."""
DEMONSTRATIONS_BYTES = 2 << 30
"""Size of demonstrations, packed and unpacked: 10 million control steps of HalfCheetah have 1 GB."""
UNPACKED_BYTES, UNPACKED_RATIO = 64 << 20, 100
"""Size of the arrays of any npz file, and how many times the file's own size they may have beyond it."""
DIRECTORY_BYTES = 8 << 20
"""Size of the list of entries of an archive: some 100,000 entries, for which Python needs some 100 MB."""
CHECKPOINT_VALUES = 1_000_000
"""Values in a checkpoint; those of a large task are some 1,000. Its tensors have no more than its size."""
XML_BYTES, XML_DEPTH, XML_ELEMENTS = 32 << 20, 200, 100_000
"""Size of a robot's XML, its nesting and its elements; the largest of 1,384 real files has 4,133."""
XML_FILES, XML_COPIES = 200, 100_000
"""Files that a robot's XML includes, and copies that `<replicate>`, `<composite>` and `<flexcomp>` make, multiplied."""
ASSET_BYTES, MESH_BYTES = 256 << 20, 64 << 20
"""Size of a mesh, a texture or a height field; of a mesh that trimesh reads."""
ASSET_NUMBERS = 20_000_000
"""Numbers in one height field, texture or custom field, and corners of the faces that a mesh file draws."""
ROBOT_BYTES = 2 << 30
"""Memory for reading a robot or compiling its scene, whatever its files ask for; ToddlerBot's 65 MB take 1.3 GB."""
