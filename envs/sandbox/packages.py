"""Python packages of the server's own that every local sandbox has: pytest, and what it needs.

They are copied into the sandboxes' root, for a mount of the originals would tell where those are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from hintloop.envs.sandbox import layout

NAMES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
_LEXERS = ("__init__", "_mapping", "diff", "python")
"""All that pytest needs of ``pygments.lexers``, which knows hundreds of languages."""
_PYTEST = '#!/bin/sh\nexec python -m pytest "$@"\n'


def install(root: str, folders: Sequence[str]) -> None:
    """Copy the packages below ``root``, with a program ``pytest``. ``OSError``."""
    for folder in folders:
        _copy(folder, f"{root}{layout.PACKAGES}/{os.path.basename(folder)}")
    if folders:
        os.makedirs(root + layout.PROGRAMS)
        with open(f"{root}{layout.PROGRAMS}/pytest", "w", encoding="ascii") as file:
            file.write(_PYTEST)
            os.fchmod(file.fileno(), 0o755)


def _copy(source: str, target: str) -> None:
    """Copy what is Python with its times, so that compiled files stay valid."""
    os.makedirs(target)
    for entry in list(os.scandir(source)):
        name = entry.name
        if "pygments/lexers" in source and name.partition(".")[0] not in (*_LEXERS, "__pycache__"):
            continue
        if entry.is_dir():
            _copy(entry.path, f"{target}/{name}")
        elif name.endswith((".py", ".pyc")):
            with open(entry.path, "rb") as old, open(f"{target}/{name}", "wb") as new:
                new.write(old.read())
            info = entry.stat()
            os.utime(f"{target}/{name}", ns=(info.st_atime_ns, info.st_mtime_ns))
