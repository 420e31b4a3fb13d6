"""The runner inside a container: process 1, which speaks to its server over its own standard input and output.

The server sends this module and those that it needs when the container starts (see ``boot_message``), so an image
needs no more than a Python 3.9. The sandbox's processes never see the two pipes: they are moved away from
descriptors 0 and 1 and closed on exec, and a forked child closes them first.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import signal
import struct
import sys
from pathlib import Path
from typing import Any

from hintloop.envs.sandbox import calls, isolation, layout, runner, wire
from hintloop.envs.sandbox.processes import Tree

BOOT = """
import json, os, struct, sys, types
def take(size):
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            os._exit(0)
        data += part
    return data
for name, source in json.loads(take(struct.unpack(">I", take(4))[0])):
    module = sys.modules[name] = types.ModuleType(name)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    if source is None:
        module.__path__ = []
    else:
        exec(compile(source, child, "exec", dont_inherit=True), module.__dict__)
sys.modules[name].main()
"""
"""What the container's interpreter is started with: it loads the modules that come first on its input."""
COMMAND = ("python3", "-I", "-S", "-B", "-X", "utf8", "-c", BOOT)
_PACKAGES = ("hintloop", "hintloop.envs", "hintloop.envs.sandbox")
_MODULES = (
    "layout",
    "limits",
    "wire",
    "processes",
    "files",
    "copying",
    "values",
    "calls",
    "commands",
    "isolation",
    "runner",
    "docker_runner",
)
"""In the order of their needs."""
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PRLIMIT64 = {"x86_64": (0xC000003E, 302), "aarch64": (0xC00000B7, 261)}
"""Machine -> the kernel's number of the architecture, and of the system call."""
_ALLOW, _REFUSE, _FOREIGN_CALLS = 0x7FFF0000, 0x00050001, 0x40000000


def boot_message(settings: dict[str, Any]) -> bytes:
    """The first bytes on a runner's input: the source of its modules, as a JSON array of name and text.

    ``settings`` follow: ``root``, the working directory; ``pristine``, whether an image has its content;
    ``memory`` and ``disk``, see ``base.SandboxSpec``; ``own_kernel``, whether no other container shares it.
    """
    folder = Path(__file__).parent
    sources: list[tuple[str, str | None]] = [(name, None) for name in _PACKAGES]
    for name in _MODULES:
        text = (folder / f"{name}.py").read_text("utf-8")
        sources.append((f"{_PACKAGES[-1]}.{name}", text))
    data = json.dumps(sources).encode()
    return struct.pack(">I", len(data)) + data + wire.pack(settings)


class Pipes:
    """Standard input and output as a ``wire.Channel``; 0 and 1 are /dev/null from then on."""

    def __init__(self) -> None:
        self._input, self._output = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (0, 1))
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.close(null)

    def fileno(self) -> int:
        return self._input

    def recv(self, size: int, /) -> bytes:
        return os.read(self._input, size)

    def sendall(self, data: bytes, /) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._output, left) :]

    def gettimeout(self) -> float | None:
        return None

    def settimeout(self, seconds: float | None, /) -> None:
        assert seconds is None, "a runner waits for its server as long as that lives"

    def close(self) -> None:
        os.close(self._input)
        os.close(self._output)


def protect_limits() -> None:
    """Forbid this process and all that it starts to set the resource limits of another one. ``OSError``.

    Agent and runner are one user in a container without any capability, and ``prlimit`` asks for no more.
    """
    architecture, call = _PRLIMIT64.get(os.uname().machine, (0, 0))
    if not call:
        raise OSError(f"no filter of system calls for {os.uname().machine}")
    load, equal, above, give = 0x20, 0x15, 0x35, 0x06
    program = [
        (load, 0, 0, 4),  # the architecture
        (equal, 0, 5, architecture),
        (load, 0, 0, 0),  # the number of the call
        (above, 3, 0, _FOREIGN_CALLS),
        (equal, 0, 3, call),
        (load, 0, 0, 16),  # its first argument: which process; 0 is the caller
        (equal, 1, 0, 0),
        (give, 0, 0, _REFUSE),
        (give, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *step) for step in program)
    steps = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(steps))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the filter of system calls is refused")


def main() -> None:
    """Say hello, then serve until the server closes. What goes wrong before that is told on standard error."""
    pipes = Pipes()
    settings, _ = wire.receive(pipes)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.umask(0o022)
    root = settings["root"]
    if settings["pristine"]:
        _copy_pristine(root)
    os.chdir(root)
    calls.warm_up()
    isolation.drop_privileges()
    protect_limits()
    # a shared kernel counts the processes of all containers' users together; there the container has a limit
    memory, disk = settings["memory"], settings["disk"]
    runner.limit_resources(memory, disk, num_processes=settings["own_kernel"])
    if os.getpid() != 1:
        raise OSError("the runner is not process 1 of its container")
    wire.send(pipes, wire.pack({"python": sys.version.split()[0]}))
    os.dup2(0, 2)  # nobody reads what is said from here on
    gc.disable()
    gc.collect()
    gc.freeze()
    runner.Runner(pipes, root, Tree(own_namespace=True, memory=memory), layout.VERIFIER).serve()


def _copy_pristine(root: str) -> None:
    """Fill the working directory with what the image keeps for it. ``OSError``."""
    shutil = importlib.import_module("shutil")  # large, and needed only here
    try:
        shutil.copytree(layout.PRISTINE, root, symlinks=True, dirs_exist_ok=True)
    except shutil.Error as error:
        raise OSError(f"the image's working directory does not fit: {error.args[0][:3]}") from None
