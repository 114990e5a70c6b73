"""Limits for reading untrusted files, by format (docs/security.md)."""

from __future__ import annotations

SETTINGS_BYTES = 1 << 20  # size of a saved yaml or json; ours are about 10 kB
SETTINGS_VALUES = 20_000  # values in saved settings; ours have about 200
SETTINGS_DEPTH = 50
NUMBER_CHARACTERS = 100  # length of a number in a saved yaml; a million digits, or `1:59:59:…` in base 60, take minutes
FOLDERS = 20  # depth of a run folder
METRICS_BYTES = 1 << 30  # size of metrics.csv; a million iterations take about 600 MB
METRICS_COLUMNS = 4096  # columns of metrics.csv; ours have about 60
LINE_BYTES = 1 << 20  # length of a csv line; 100 columns take about 2 kB
COPIED_BYTES = 1 << 30  # size of a damaged file to copy before replacing it
CLIP_BYTES = 256 << 20  # size of a motion clip, packed and unpacked; 10 minutes of a humanoid at 50 Hz take 60 MB
RESAMPLED_BYTES, RESAMPLED_RATIO = 32 << 20, 10  # size of a resampled clip, or multiple of the file size, if larger
DEMONSTRATIONS_BYTES = 2 << 30  # size of demonstrations, packed and unpacked; 10 million steps of HalfCheetah take 1 GB
UNPACKED_BYTES, UNPACKED_RATIO = 64 << 20, 100  # size of an npz file's arrays, or multiple of the file size, if larger
DIRECTORY_BYTES = 8 << 20  # size of an archive's entry list: about 100,000 entries, for which Python needs 100 MB
CHECKPOINT_VALUES = 1_000_000  # values in a checkpoint; a large task has about 1,000
XML_BYTES, XML_DEPTH, XML_ELEMENTS = 32 << 20, 200, 100_000  # of a robot file; 1,384 published files: <= 4,133 elements
XML_FILES, XML_COPIES = 200, 100_000  # includes of a robot's XML, copies by `<replicate>`, `<composite>`, `<flexcomp>`
ASSET_BYTES, MESH_BYTES = 256 << 20, 64 << 20  # size of a mesh, texture or height field; of a mesh read by trimesh
ASSET_NUMBERS = 20_000_000  # numbers in a height field, texture or custom field, and face vertices of a mesh
ROBOT_BYTES = 2 << 30  # memory for reading a robot or compiling its scene; ToddlerBot (65 MB) takes 1.3 GB
