"""Python packages of the server's own that every local sandbox has: pytest, and what it needs.

They are copied into the sandboxes' root, for a mount of the originals would tell where those are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hintloop.envs.sandbox import layout

NAMES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
_LEXERS = ("__init__", "_mapping", "diff", "python")
"""All that pytest needs of ``pygments.lexers``, which knows hundreds of languages."""
_PYTEST = '#!/bin/sh\nexec python -m pytest "$@"\n'


def opened(folders: Sequence[str]) -> dict[str, int]:
    """Name of each package -> its folder, open; a mount over what is above it then hides nothing. ``OSError``."""
    return {os.path.basename(folder): os.open(folder, os.O_RDONLY | os.O_DIRECTORY) for folder in folders}


def install(root: str, packages: Mapping[str, int]) -> None:
    """Copy opened packages below ``root``, with a program ``pytest``, and close them. ``OSError``."""
    for name, fd in packages.items():
        _copy(f"/proc/self/fd/{fd}", f"{root}{layout.PACKAGES}/{name}")
        os.close(fd)
    if packages:
        os.makedirs(root + layout.PROGRAMS)
        with open(f"{root}{layout.PROGRAMS}/pytest", "w", encoding="ascii") as file:
            file.write(_PYTEST)
            os.fchmod(file.fileno(), 0o755)


def _copy(source: str, target: str) -> None:
    """Copy what is Python with its times, so that compiled files stay valid."""
    os.makedirs(target)
    for entry in list(os.scandir(source)):
        name = entry.name
        if "pygments/lexers" in target and name.partition(".")[0] not in (*_LEXERS, "__pycache__"):
            continue
        if entry.is_dir():
            _copy(entry.path, f"{target}/{name}")
        elif name.endswith((".py", ".pyc")):
            with open(entry.path, "rb") as old, open(f"{target}/{name}", "wb") as new:
                new.write(old.read())
            info = entry.stat()
            os.utime(f"{target}/{name}", ns=(info.st_atime_ns, info.st_mtime_ns))
