"""Sandboxes in Docker containers, each its own; with ``runtime="runsc"`` each has a kernel of its own (gVisor).

A container costs about half a second to start, so a pool keeps some ready, of the provider's own image and with
the usual limits; a task that wants others waits for its container. What runs in one is asked for through
its standard input, which a runner inside reads (see ``docker_runner``): no ``docker exec`` per call.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Self

import structlog

from hintloop.envs.sandbox import layout, wire
from hintloop.envs.sandbox.base import USUAL, SandboxDead, SandboxSpec
from hintloop.envs.sandbox.client import RunnerSandbox
from hintloop.envs.sandbox.docker_engine import Attached, ContainerSpec, Engine
from hintloop.envs.sandbox.docker_images import Images, Prepared
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
    engine knows (``runsc`` is gVisor), None takes its default. ``pool`` containers are kept ready. Raises
    ``SandboxDead`` when there is no engine, image or runtime.
    """

    def __init__(self, image: str = IMAGE, *, runtime: str | None = None, pool: int = POOL):
        self._engine = Engine()
        self._check(image, runtime)
        self._image = image
        self._runtime = runtime
        self._run = os.urandom(8).hex()
        self._labels = {OWNER: own_identity(), RUN: self._run}
        self._images = Images(self._engine)
        self._making = threading.Semaphore(_AT_ONCE)
        self.isolation = f"docker+{runtime or 'runc'}"
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[int, RunnerSandbox] = {}
        self._closed = False
        if orphans := reap_orphans(self._engine):
            structlog.get_logger().info("removed_old_containers", count=orphans)
        self._pool = Pool(lambda: self._make(USUAL), size=pool, makers=_AT_ONCE)

    @property
    def run_id(self) -> str:
        """The value of the label that all containers of this provider carry."""
        return self._run

    def num_ready(self) -> int:
        """How many sandboxes the pool holds now."""
        return self._pool.num_ready()

    def start(self, files: dict[str, str], spec: SandboxSpec = USUAL) -> RunnerSandbox:
        """A fresh sandbox with ``files``. ``SandboxDead``; ``ValueError`` when they do not fit into it."""
        usual = replace(spec, env={}, context=None) == USUAL
        sandbox = self._take(spec.env) if usual else self._make_now(spec)
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
            if self._engine.find_image(image) is None:
                raise SandboxDead(
                    f"the engine has no image {image!r}; containers/sandbox.Dockerfile makes it"
                )
        except SandboxDead:
            self._engine.close()
            raise

    def _take(self, env: dict[str, str]) -> RunnerSandbox:
        deadline = time.monotonic() + _WAIT
        while True:
            sandbox, stream = self._pool.take(max(0.0, deadline - time.monotonic()))
            if stream.quiet():
                sandbox.env = env
                return sandbox
            sandbox.close()  # it died while it waited

    def _make_now(self, spec: SandboxSpec, *, filled: bool = True) -> RunnerSandbox:
        """One that the pool has not; ``filled`` with what its image has in the working directory."""
        if not self._making.acquire(timeout=_WAIT):
            raise SandboxDead(f"no sandbox could be started within {_WAIT:g} s")
        try:
            sandbox = None if self._closed else self._make(spec, filled=filled)[0]
        finally:
            self._making.release()
        if sandbox is not None and not self._closed:
            return sandbox
        if sandbox is not None:
            sandbox.close()
        raise SandboxDead("the provider is closed")

    def _make(self, spec: SandboxSpec, *, filled: bool = True) -> tuple[RunnerSandbox, Attached]:
        prepared = None if spec.image is None else self._images.prepare(spec)
        container_spec = self._container(spec, prepared)
        settings = {
            "root": container_spec.workdir,
            "pristine": filled and prepared is not None,
            "memory": spec.memory,
            "disk": spec.disk,
            "own_kernel": container_spec.own_kernel,
        }
        container, stream = self._engine.run(container_spec)
        try:
            deadline = time.monotonic() + _HELLO
            stream.settimeout(_HELLO)
            stream.sendall(boot_message(settings))
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
            env={**(prepared.env if prepared else {}), **spec.env},
            on_close=lambda clean: self._forget(number, container, clean),
            start_other=lambda: self._start_other(sandbox, spec),
        )
        with self._lock:
            self._open[number] = sandbox
        return sandbox, stream

    def _start_other(self, first: RunnerSandbox, spec: SandboxSpec) -> RunnerSandbox:
        if spec == USUAL:
            return self._take(first.env)
        return self._make_now(spec, filled=False)

    def _container(self, spec: SandboxSpec, prepared: Prepared | None) -> ContainerSpec:
        return ContainerSpec(
            image=prepared.image if prepared else self._image,
            runtime=self._runtime,
            workdir=prepared.workdir if prepared else layout.WORKSPACE,
            memory=spec.memory,
            disk=spec.disk,
            cpus=spec.cpus,
            labels=self._labels,
            env=() if prepared else ("PATH=/usr/local/bin:/usr/bin:/bin",),
        )

    def _forget(self, number: int, container: str, clean: bool) -> None:
        with self._lock:
            self._open.pop(number, None)
        if not clean:
            try:
                self._engine.remove(container)
            except SandboxDead as error:
                structlog.get_logger().warning("container_not_removed", error=str(error))
