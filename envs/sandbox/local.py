"""Sandboxes on this machine, without Docker: Linux namespaces, a private root and resource limits.

One zygote process forks a runner per sandbox; see ``zygote`` and ``isolation``. Where the kernel or an outer
container forbids namespaces the provider still works and says truthfully what ``isolation`` is left.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Sequence
from typing import Self

import structlog

from hintloop.envs.sandbox.base import USUAL, SandboxDead, SandboxSpec, Unsupported
from hintloop.envs.sandbox.client import RunnerSandbox
from hintloop.envs.sandbox.isolation import NAMESPACES
from hintloop.envs.sandbox.spawn import ZygoteProcess


class LocalProvider:
    """Sandboxes forked from one zygote; see ``base.SandboxProvider``. Threads may share it.

    ``namespaces`` are those to try for. None at all is the fallback of a host that allows none.
    """

    def __init__(self, namespaces: Sequence[str] = tuple(NAMESPACES)):
        self._wanted = tuple(namespaces)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[int, RunnerSandbox] = {}
        self._closed = False
        self._zygote = ZygoteProcess(self._wanted)
        self.isolation = self._zygote.isolation
        missing = sorted({"user", "pid", "mount", "net"} - set(self.isolation.split("+")))
        if missing:
            structlog.get_logger().warning("weak_sandbox", isolation=self.isolation, missing=missing)

    @property
    def zygote_pid(self) -> int:
        """Process id of the zygote, for measurements."""
        return self._zygote.pid

    def start(self, files: dict[str, str], spec: SandboxSpec = USUAL) -> RunnerSandbox:
        """A fresh sandbox with ``files``. ``SandboxDead``; ``ValueError`` when they do not fit into it.

        ``Unsupported`` for a task with an image. The share of processors cannot be bounded here.
        """
        if spec.image is not None:
            raise Unsupported(
                f"the local sandbox has no container images, and the task needs {spec.image!r}; use env.sandbox=docker "
                "(tasks check --sandbox docker)"
            )
        try:
            return self._start_once(files, spec)
        except SandboxDead:
            if self._closed or self._zygote.alive():
                raise
            return self._start_once(files, spec)

    def close(self) -> None:
        """Close all sandboxes that are still open, and the zygote."""
        with self._lock:
            self._closed = True
            sandboxes = list(self._open.values())
        for sandbox in sandboxes:
            sandbox.close()
        self._zygote.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_once(self, files: dict[str, str], spec: SandboxSpec) -> RunnerSandbox:
        sandbox = self._start_empty(spec)
        try:
            sandbox.fill(files)
        except ValueError:
            sandbox.close()
            raise
        return sandbox

    def _start_empty(self, spec: SandboxSpec) -> RunnerSandbox:
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            number = next(self._numbers)
            try:
                zygote = self._living_zygote()
                zygote.order(f"start {number} {spec.memory} {spec.disk}", [theirs])
            except OSError as error:
                ours.close()
                self._zygote.stop()
                raise SandboxDead(f"the zygote is gone: {error}") from None
            except SandboxDead:
                ours.close()
                raise
            sandbox = RunnerSandbox(
                ours,
                zygote.isolation,
                env=spec.env,
                on_close=lambda clean: self._forget(number, zygote, clean),
                start_other=lambda: self._start_empty(spec),
            )
            self._open[number] = sandbox
        return sandbox

    def _living_zygote(self) -> ZygoteProcess:
        if self._closed:
            raise SandboxDead("the provider is closed")
        if not self._zygote.alive():
            self._zygote.stop()
            self._zygote = ZygoteProcess(self._wanted)
            self.isolation = self._zygote.isolation
        return self._zygote

    def _forget(self, number: int, zygote: ZygoteProcess, clean: bool) -> None:
        with self._lock:
            self._open.pop(number, None)
            if not clean:
                with contextlib.suppress(OSError):
                    zygote.order(f"kill {number}")
