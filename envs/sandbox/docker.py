"""Sandboxes in Docker containers, each its own; with ``runtime="runsc"`` each has a kernel of its own (gVisor).

A container costs about half a second to start, so a pool keeps some ready. What runs in one is asked for through
its standard input, which a runner inside reads (see ``docker_runner``): no ``docker exec`` per call.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import structlog

from hintloop.envs.sandbox import wire
from hintloop.envs.sandbox.base import SandboxDead
from hintloop.envs.sandbox.client import RunnerSandbox
from hintloop.envs.sandbox.docker_engine import Attached, ContainerSpec, Engine
from hintloop.envs.sandbox.docker_pool import Pool
from hintloop.envs.sandbox.docker_reaper import OWNER, RUN, own_identity, reap_orphans, reap_run
from hintloop.envs.sandbox.docker_runner import boot_message

IMAGE = "hintloop-sandbox"
"""Made by ``containers/sandbox.Dockerfile``; any image with a Python 3.9 will do."""
POOL = 4
_AT_ONCE = min(4, os.cpu_count() or 1)
"""Containers that are started at the same time; more of them only slow each other down."""
_HELLO = 30.0
"""Seconds for a runner to say hello."""
_WAIT = 120.0
"""Seconds that a start may wait for its turn."""
_CLOSERS = 8


class DockerProvider:
    """Sandboxes in containers; see ``base.SandboxProvider``. Threads may share it.

    ``image`` must be on the engine and have ``python3`` and ``/bin/sh``. ``runtime`` names an OCI runtime that the
    engine knows (``runsc`` is gVisor), None takes its default. ``pool`` containers are kept ready; ``cpus`` is the
    share of processor time of each. Raises ``SandboxDead`` when there is no engine, image or runtime.
    """

    def __init__(
        self, image: str = IMAGE, *, runtime: str | None = None, pool: int = POOL, cpus: float = 1.0
    ):
        self._engine = Engine()
        self._check(image, runtime)
        self._run = os.urandom(8).hex()
        self._spec = ContainerSpec(image, runtime, cpus, {OWNER: own_identity(), RUN: self._run})
        self.isolation = f"docker+{runtime or 'runc'}"
        self._boot = boot_message()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[int, RunnerSandbox] = {}
        self._closed = False
        if orphans := reap_orphans(self._engine):
            structlog.get_logger().info("removed_old_containers", count=orphans)
        self._pool = Pool(self._make, size=pool, makers=_AT_ONCE)

    @property
    def run_id(self) -> str:
        """The value of the label that all containers of this provider carry."""
        return self._run

    def num_ready(self) -> int:
        """How many sandboxes the pool holds now."""
        return self._pool.num_ready()

    def start(self, files: dict[str, str]) -> RunnerSandbox:
        """A fresh sandbox with ``files``. ``SandboxDead``; ``ValueError`` when they do not fit into it."""
        sandbox = self._take()
        try:
            sandbox.fill(files)
        except ValueError:
            sandbox.close()
            raise
        return sandbox

    def close(self) -> None:
        """Close all sandboxes, and see every container removed."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._pool.close()
        with self._lock:
            sandboxes = list(self._open.values())
        with ThreadPoolExecutor(_CLOSERS) as closers:
            list(closers.map(RunnerSandbox.close, sandboxes))
        try:
            reap_run(self._engine, self._run)
        except SandboxDead as error:
            structlog.get_logger().warning("containers_left", error=str(error))
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, image: str, runtime: str | None) -> None:
        try:
            if runtime is not None and runtime not in (known := self._engine.runtimes()):
                raise SandboxDead(f"the engine has no runtime {runtime!r}, only {', '.join(known)}")
            if not self._engine.has_image(image):
                raise SandboxDead(
                    f"the engine has no image {image!r}; containers/sandbox.Dockerfile makes it"
                )
        except SandboxDead:
            self._engine.close()
            raise

    def _take(self) -> RunnerSandbox:
        deadline = time.monotonic() + _WAIT
        while True:
            sandbox, stream = self._pool.take(max(0.0, deadline - time.monotonic()))
            if stream.quiet():
                return sandbox
            sandbox.close()  # it died while it waited

    def _make(self) -> tuple[RunnerSandbox, Attached]:
        container, stream = self._engine.run(self._spec)
        try:
            deadline = time.monotonic() + _HELLO
            stream.settimeout(_HELLO)
            stream.sendall(self._boot)
            wire.receive(stream, deadline=deadline)
        except (OSError, EOFError, ValueError) as error:
            stream.close()
            self._engine.remove(container)
            told = stream.errors.decode("utf-8", "replace").strip()
            raise SandboxDead(f"the runner did not start: {error}; it said {told[-500:]!r}") from None
        number = next(self._numbers)
        sandbox = RunnerSandbox(
            stream,
            self.isolation,
            on_close=lambda clean: self._forget(number, container, clean),
            start_other=lambda: self.start({}),
        )
        with self._lock:
            self._open[number] = sandbox
        return sandbox, stream

    def _forget(self, number: int, container: str, clean: bool) -> None:
        with self._lock:
            self._open.pop(number, None)
        if not clean:
            try:
                self._engine.remove(container)
            except SandboxDead as error:
                structlog.get_logger().warning("container_not_removed", error=str(error))
