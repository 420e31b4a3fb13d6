"""What one sandbox may use. Sizes are bytes, times are seconds."""

from __future__ import annotations

MiB = 1024 * 1024

MEMORY = 512 * MiB
"""Address space of one process."""
TREE_MEMORY = 2 * MEMORY
"""Private memory of all processes of a sandbox together; beyond it they are killed."""
RUNNER_MEMORY = 128 * MiB
"""What a container may use beyond its processes' memory and files: runner, kernel's own."""
DISK = 64 * MiB
"""Size of the working directory, and of the temp folder, and of one file."""
INODES = 8192
PROCESSES = 64
OPEN_FILES = 256
OUTPUT = 64 * 1024
"""Kept output of one command: half from its start and half from its end."""
OUTPUT_FLOOD = 64 * MiB
"""A command that writes more than this is killed."""
READ = MiB
WRITE = 4 * MiB
LISTED_FILES = 1000
VALUE = 256 * 1024
"""JSON text of one returned value."""
VALUES = 8 * MiB
"""All values of one request together."""
VALUE_DEPTH = 50
ERROR_CHARS = 200
WATCH_INTERVAL = 0.05
"""How often memory and process count of a running command are looked at."""
