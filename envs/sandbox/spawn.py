"""Starting the zygote: a bare interpreter with a control socket, and nothing else of the server's."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hintloop.envs.sandbox import packages
from hintloop.envs.sandbox.base import SandboxDead

_START = 10.0
"""Seconds for a zygote to start."""
_STOP = 8.0
"""Seconds that a zygote gets to see all its runners dead."""
_BOOT = """
import json, socket, sys, types
control = socket.socket(fileno=int(sys.argv[1]))
folder, *told = json.loads(control.recv(65536))
for name in ("hintloop", "hintloop.envs", "hintloop.envs.sandbox"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder] if name.endswith("sandbox") else []
from hintloop.envs.sandbox.zygote import main
main(control, *told)
"""
"""Loads the sandbox modules, and nothing else of the package, into an interpreter without site-packages.

No path of the host is in its arguments, which a sandbox can see."""


class ZygoteProcess:
    """A running zygote and its control socket. ``SandboxDead`` when it does not start."""

    def __init__(self, wanted: Sequence[str]):
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_START)
        python = getattr(sys, "_base_executable", sys.executable)
        told = [str(Path(__file__).parent), tempfile.gettempdir(), wanted, _packages()]
        self._control.send(json.dumps(told).encode())
        with theirs:
            self._process = subprocess.Popen(
                [python, "-I", "-S", "-B", "-X", "utf8", "-c", _BOOT, str(theirs.fileno())],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            hello = self._control.recv(4096)
        except OSError as error:
            hello = str(error).encode()
        if not hello.startswith(b"{"):
            self._process.kill()
            _, errors = self._process.communicate(timeout=_STOP)
            self._control.close()
            raise SandboxDead(f"the zygote did not start: {errors.decode(errors='replace')[-500:]}")
        assert self._process.stderr is not None
        self._process.stderr.close()
        told = json.loads(hello)
        self.isolation: str = told["isolation"]
        self.pid: int = told["pid"]

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def order(self, text: str, sockets: Sequence[socket.socket] = ()) -> None:
        """Tell it something. ``OSError`` when it is gone."""
        socket.send_fds(self._control, [text.encode()], [sock.fileno() for sock in sockets])

    def stop(self) -> None:
        """End it and all its runners."""
        self._control.close()
        try:
            self._process.wait(_STOP)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP)


def _packages() -> list[str]:
    """Folders of the packages that sandboxes have; none when one of them is not installed here."""
    specs = [importlib.util.find_spec(name) for name in packages.NAMES]
    folders = [spec.submodule_search_locations for spec in specs if spec is not None]
    found = [next(iter(folder)) for folder in folders if folder]
    return found if len(found) == len(packages.NAMES) else []
