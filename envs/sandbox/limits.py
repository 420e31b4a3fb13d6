"""What one sandbox may use. Sizes are bytes, times are seconds."""

from __future__ import annotations

MiB = 1024 * 1024

MEMORY = 512 * MiB
"""Address space of one process."""
TREE = 2
"""All processes of a sandbox together may use so many times that as private memory; beyond it they are killed."""
RUNNER_MEMORY = 128 * MiB
"""What a container may use beyond its processes' memory and files: runner, kernel's own."""
DISK = 64 * MiB
"""Size of the working directory, and of the temp folder, and of one file."""
BYTES_PER_INODE = 8192
"""So many bytes of a folder's size allow for one file in it."""
VERIFIER = 32 * MiB
"""Size of each of the folders for who grades."""
PROCESSES = 64
OPEN_FILES = 256
OUTPUT = 64 * 1024
"""Kept output of one command: half from its start and half from its end."""
OUTPUT_FLOOD = 64 * MiB
"""A command that writes more than this is killed."""
READ = MiB
WRITE = 4 * MiB
LISTED_FILES = 1000
CHANGED_FILES = 2000
"""Names of changed files that are told, and of removed ones."""
WATCHED_FILES = 50_000
"""More files than this are not watched for changes."""
VALUE = 256 * 1024
"""JSON text of one returned value."""
VALUES = 8 * MiB
"""All values of one request together."""
VALUE_DEPTH = 50
ERROR_CHARS = 200
WATCH_INTERVAL = 0.05
"""How often memory and process count of a running command are looked at."""
