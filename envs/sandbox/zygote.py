"""The zygote: a small single-threaded process that forks one runner per sandbox.

Forking from it costs a few milliseconds where a new interpreter costs twenty, and it holds none of the
server's memory, environment or open files. It says once what it can isolate, then obeys
``start <id> <memory> <disk>`` (which comes with the runner's socket) and ``kill <id>`` until the server closes the
control socket.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence

from hintloop.envs.sandbox import calls, isolation, layout, limits, packages, runner, wire
from hintloop.envs.sandbox.processes import Tree

_REAP_INTERVAL_MS = 100
_GRACE = 5.0
"""Seconds that runners get to end by themselves when the server is gone."""


class Zygote:
    """What it can isolate, and its runners."""

    def __init__(self, control: socket.socket, temp: str, wanted: Sequence[str]):
        self._control = control
        self._temp = temp
        self._pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._ids = isolation.unprivileged_ids()
        self._runners: dict[int, tuple[str, str | None]] = {}
        """Pid -> sandbox id, and its folder when that is on the host's disk."""
        self._names: list[str] = []
        if "mount" in wanted:
            self._names = self._possible([name for name in isolation.NAMESPACES if name in wanted])

    def serve(self) -> None:
        """Obey until the server closes, then see every runner dead."""
        hello = {"isolation": "+".join(self._names) or "none", "pid": int(os.readlink("/proc/self"))}
        self._control.send(json.dumps(hello).encode())
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while True:
            if poll.poll(_REAP_INTERVAL_MS if self._runners else None):
                data, fds, _, _ = socket.recv_fds(self._control, 256, 1)
                if not data:
                    break
                for fd in fds:
                    os.set_inheritable(fd, False)
                self._obey(data.decode(), fds)
            self._reap()
        self._end()

    def _possible(self, names: list[str]) -> list[str]:
        """All of ``names`` if that works, else those that work together with the ones before them."""
        if self._starts(names):
            return names
        kept: list[str] = []
        for name in ["mount", *(name for name in names if name != "mount")]:
            if self._starts([*kept, name]):
                kept.append(name)
        return [name for name in names if name in kept] if "mount" in kept else []

    def _starts(self, names: list[str]) -> bool:
        def attempt() -> None:
            pid = self._fork(names, lambda: isolation.enter_sandbox(names, *self._ids, limits.DISK))
            if os.waitpid(pid, 0)[1] != 0:
                raise OSError("the sandbox did not start")

        return isolation.works(attempt)

    def _fork(self, names: Sequence[str], life: Callable[[], None]) -> int:
        """Fork a process that runs ``life`` and exits; with ``pid`` it is process 1 of a new namespace."""
        if "pid" in names:
            isolation.unshare(["pid"])
        try:
            pid = os.fork()
        except OSError:
            self._rejoin(names)
            raise
        if pid == 0:
            code = 1
            try:
                life()
                code = 0
            finally:
                os._exit(code)
        self._rejoin(names)
        return pid

    def _rejoin(self, names: Sequence[str]) -> None:
        if "pid" in names:
            isolation.rejoin_pid_namespace(self._pid_namespace)

    def _obey(self, text: str, fds: list[int]) -> None:
        order, name, *sizes = text.split(" ")
        if order == "start":
            memory, disk = map(int, sizes)
            with socket.socket(fileno=fds[0]) as sock:
                try:
                    self._start(name, sock, memory, disk)
                except OSError as error:
                    wire.send(sock, wire.pack({"failed": str(error)}))
        else:
            for pid in [pid for pid, (other, _) in self._runners.items() if other == name]:
                os.kill(pid, signal.SIGKILL)

    def _start(self, name: str, sock: socket.socket, memory: int, disk: int) -> None:
        folder = None
        if not self._names:
            folder = os.path.join(self._temp, f"hintloop-{os.getpid()}-{name}")
            os.mkdir(folder, 0o700)
            os.chown(folder, *self._ids)
        pid = self._fork(self._names, lambda: self._live(sock, folder, memory, disk))
        self._runners[pid] = (name, folder)

    def _live(self, sock: socket.socket, folder: str | None, memory: int, disk: int) -> None:
        """The life of a runner."""
        self._control.close()
        os.close(self._pid_namespace)
        os.setsid()
        try:
            if folder is None:
                isolation.enter_sandbox(self._names, *self._ids, disk)
            else:
                os.chdir(folder)
                isolation.become(*self._ids)
                isolation.drop_privileges()
            if "pid" in self._names:
                isolation.die_with_parent()
            else:
                isolation.adopt_orphans()
            runner.limit_resources(memory, disk, num_processes="user" in self._names)
        except OSError as error:
            wire.send(sock, wire.pack({"failed": str(error)}))
            raise
        tree = Tree("pid" in self._names, memory)
        folders = layout.VERIFIER if folder is None else ()
        runner.Runner(sock, folder or layout.WORKSPACE, tree, folders).serve()

    def _reap(self) -> None:
        while self._runners:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _, folder = self._runners.pop(pid)
            if folder is not None:
                _remove(folder)

    def _end(self) -> None:
        deadline = time.monotonic() + _GRACE
        while self._runners and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.005)
        for pid in self._runners:
            os.kill(pid, signal.SIGKILL)
        while self._runners:
            self._reap()
            time.sleep(0.005)


def _remove(folder: str) -> None:
    """Remove a folder that an agent has filled, following no link; what resists stays."""
    shutil = importlib.import_module("shutil")  # needed only here, and large in every fork
    shutil.rmtree(folder, ignore_errors=True)


def _enter_own_namespaces(control: socket.socket, wanted: Sequence[str], shown: Sequence[str]) -> bool:
    """Move into the small root and, as process 1, into a pid namespace that this process may come back to.

    Whatever kills this process then kills every sandbox too. False when the small root cannot be made.
    """
    if "mount" not in wanted or not isolation.works(isolation.enter_root):
        return False
    folders = packages.opened(shown)
    isolation.enter_root(lambda root: packages.install(root, folders))
    if "pid" in wanted and isolation.works(lambda: isolation.unshare(["pid"])):
        isolation.unshare(["pid"])
        pid = os.fork()
        if pid:
            control.close()
            os.waitpid(pid, 0)
            os._exit(0)
        isolation.die_with_parent()
    return True


def main(control: socket.socket, temp: str, wanted: Sequence[str], shown: Sequence[str]) -> None:
    """Be a zygote until ``control`` is closed; ``temp`` is where folders go that cannot be private mounts.

    ``shown`` are the folders of Python packages that all sandboxes are to have.
    """
    calls.warm_up()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a handler would let an agent interrupt process 1
    os.umask(0o022)
    control.set_inheritable(False)
    with control:
        has_root = _enter_own_namespaces(control, wanted, shown)
        zygote = Zygote(control, temp, wanted if has_root else ())
        os.dup2(1, 2)  # from here on nobody reads what is said there
        gc.disable()
        gc.collect()
        gc.freeze()
        zygote.serve()
