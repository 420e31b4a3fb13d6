"""Containers that nobody needs any more: whose owner died before it could remove them.

A sandbox's container ends by itself when its server's connection does. This is for what is left nevertheless: a
container that was made but never started, or one that was stuck.
"""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from hintloop.envs.sandbox.base import SandboxDead
from hintloop.envs.sandbox.docker_engine import Engine, Found

OWNER = "hintloop.sandbox.owner"
"""Label: host, boot, process and its start time, separated by blanks."""
RUN = "hintloop.sandbox.run"
"""Label: the provider's own id."""
_STALE = 600.0
"""Seconds after which a container that does not run is nobody's, whoever made it."""
_GONE = 15.0
"""Seconds that the engine gets to remove what is to be removed."""
_WORKERS = 4


def own_identity() -> str:
    """The value of ``OWNER`` for this process."""
    return f"{socket.gethostname()} {_boot()} {os.getpid()} {_started(os.getpid())}"


def reap_orphans(engine: Engine) -> int:
    """Remove the containers of dead owners on this host, and old ones that do not run; how many there were."""
    orphans = [found for found in engine.find(OWNER) if _is_orphan(found, time.time())]
    _remove(engine, orphans)
    return len(orphans)


def reap_run(engine: Engine, run: str) -> None:
    """Remove all containers of one run and wait until they are gone. ``SandboxDead`` when some are not."""
    deadline = time.monotonic() + _GONE
    while left := engine.find(f"{RUN}={run}"):
        if time.monotonic() > deadline:
            raise SandboxDead(f"{len(left)} containers cannot be removed")
        _remove(engine, left)
        time.sleep(0.1)


def _remove(engine: Engine, containers: list[Found]) -> None:
    def one(found: Found) -> None:
        try:
            engine.remove(found.container)
        except SandboxDead as error:
            structlog.get_logger().warning("container_not_removed", error=str(error))

    with ThreadPoolExecutor(_WORKERS) as pool:
        list(pool.map(one, containers))


def _is_orphan(found: Found, now: float) -> bool:
    if not found.running and now - found.created > _STALE:
        return True
    host, boot, pid, started = (found.labels[OWNER].split(" ") + [""] * 4)[:4]
    if host != socket.gethostname():
        return False
    return boot != _boot() or not pid.isdigit() or _started(int(pid)) != started


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return "-"


def _started(pid: int) -> str:
    """When a process started; ``-`` where the system does not tell, and nothing when there is none."""
    if Path("/proc/self/stat").exists():
        try:
            return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19]
        except (FileNotFoundError, ProcessLookupError):
            return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        return "-"
    return "-"
