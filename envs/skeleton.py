"""A task to start from, as a folder in Harbor's format."""

from __future__ import annotations

import os
import re
import shutil
from importlib.resources import as_file, files
from pathlib import Path

KINDS = ("fix", "write")
"""Mend given code; write from an empty folder."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def write_skeleton(folder: Path, kind: str) -> None:
    """Make a task's folder, whole or not at all. ``ValueError`` for a bad name or kind, ``FileExistsError``."""
    if kind not in KINDS:
        raise ValueError(f"a task is of kind {' or '.join(KINDS)}, not {kind!r}")
    if not _NAME.fullmatch(folder.name):
        raise ValueError(f"a task's name has letters, digits, '.', '_' and '-' only, not {folder.name!r}")
    if folder.exists():
        raise FileExistsError(f"{folder} exists already")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    with as_file(files("hintloop.envs") / "skeletons" / kind) as source:
        shutil.copytree(source, part)
    manifest = part / "task.toml"
    manifest.write_text(manifest.read_text("utf-8").replace("local/NAME", f"local/{folder.name}"), "utf-8")
    part.replace(folder)
