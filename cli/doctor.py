"""``hintloop doctor``: what this machine has of what the loop needs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from hintloop.cli.errors import UserError

MIN_DISK_GB = 2.0
_STACK = ("torch", "transformers", "trl", "renderers", "openenv", "pyarrow")
_WALL = ("user", "pid", "mount", "net")


def examine() -> list[dict[str, Any]]:
    """One row per check; ``verdict`` is ``ok``, ``weak`` (works, less well) or ``missing``."""
    return [
        _python(),
        *(_package(name) for name in _STACK),
        _cores(),
        _disk(),
        _student(),
        _sandbox(),
        _docker(),
    ]


def _row(check: str, found: str, verdict: str) -> dict[str, Any]:
    return {"check": check, "found": found, "verdict": verdict}


def _python() -> dict[str, Any]:
    return _row("python", platform.python_version(), "ok" if sys.version_info >= (3, 11) else "missing")


def _package(name: str) -> dict[str, Any]:
    if importlib.util.find_spec(name) is None:
        return _row(name, "not installed; pip install 'hintloop[train]'", "missing")
    return _row(name, importlib.metadata.version(name), "ok")


def _cores() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _row("processor cores", str(cores), "ok" if cores >= 2 else "weak")


def _disk() -> dict[str, Any]:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    return _row("free disk here", f"{free:.1f} GB", "ok" if free >= MIN_DISK_GB else "weak")


def _student() -> dict[str, Any]:
    from hintloop.cli.model import BUNDLED, find_model

    try:
        weights = find_model(BUNDLED[0]).joinpath("model.safetensors")
        return _row("bundled student", f"{weights.stat().st_size / 1e6:.1f} MB", "ok")
    except (UserError, OSError) as error:
        return _row("bundled student", str(error), "missing")


def _sandbox() -> dict[str, Any]:
    from hintloop.envs.sandbox.local import LocalProvider

    with LocalProvider() as provider:
        found = provider.isolation
    lacking = [name for name in _WALL if name not in found.split("+")]
    return _row("sandbox isolation", found, "weak" if lacking else "ok")


def _docker() -> dict[str, Any]:
    """Docker is one way to have sandboxes, so a machine without it lacks nothing that the loop needs."""
    from hintloop.envs.sandbox.base import SandboxDead

    if importlib.util.find_spec("docker") is None:
        return _row("docker sandboxes", "no client; pip install 'hintloop[docker]'", "weak")
    from hintloop.envs.sandbox.docker import IMAGE
    from hintloop.envs.sandbox.docker_engine import Engine

    try:
        engine = Engine()
        with contextlib.closing(engine):
            found = engine.runtimes()
            runtimes = ", ".join(found) + ("" if "runsc" in found else " (no runsc, so no docker+gvisor)")
            if engine.find_image(IMAGE) is None:
                return _row("docker sandboxes", f"runtimes {runtimes}; no image {IMAGE}", "weak")
    except SandboxDead as error:
        installed = "not running" if shutil.which("dockerd") or shutil.which("docker") else "not installed"
        return _row("docker sandboxes", f"{installed}: {error}"[:200], "weak")
    return _row("docker sandboxes", f"runtimes {runtimes}; image {IMAGE}", "ok")
