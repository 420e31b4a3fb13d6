"""Containers through the Docker SDK: how a sandbox's container is made, talked to, found and removed."""

from __future__ import annotations

import contextlib
import io
import os
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import docker
import docker.constants
import docker.errors
import docker.utils
import requests.exceptions

from hintloop.envs.sandbox import layout, limits
from hintloop.envs.sandbox.base import SandboxDead
from hintloop.envs.sandbox.docker_runner import COMMAND
from hintloop.envs.sandbox.isolation import room

USER = "65532:65532"
_TIMEOUT = 60.0
"""Seconds for one request to the engine; a busy one takes a while to start a container."""
_BUILD = 900.0
"""Seconds without a word from the engine while it makes an image."""
_CONNECTIONS = 32
_ERRORS = 2000
"""Bytes of a container's standard error that are kept for a message."""
_STDOUT = 1
_FRAME = 8
"""Bytes before each piece of output: the stream's number, three zeros, the length."""


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """What containers are made of; all but this is fixed."""

    image: str
    runtime: str | None
    """Name of the OCI runtime, e.g. ``runsc``; None is the engine's own default."""
    workdir: str
    memory: int
    disk: int
    cpus: float
    """These three: see ``base.SandboxSpec``."""
    labels: dict[str, str]
    env: tuple[str, ...]
    """``NAME=value`` each, for the runner alone, beside what the image sets."""

    @property
    def own_kernel(self) -> bool:
        """Whether no other container shares the kernel."""
        return self.runtime is not None and "runsc" in self.runtime


def container_config(spec: ContainerSpec) -> dict[str, Any]:
    """The body of the engine's create request.

    No network, read-only root with size-limited tmpfs for all that can be written, no capability, no new privilege,
    no swap. The runner is process 1 and reaps what is orphaned, so there is no ``init`` before it: process 1 is the
    only one that the agent, who is the same user, cannot kill. The container ends with the connection to its input,
    and is then removed by the engine. Its output is the runner's messages, so it is not logged.
    """
    flags = "nosuid,nodev,exec"
    own = "{},mode=0700,uid={},gid={}".format(flags, *USER.split(":"))
    files = 2 * spec.disk + len(layout.VERIFIER) * limits.VERIFIER
    memory = limits.TREE * spec.memory + files + limits.RUNNER_MEMORY
    host: dict[str, Any] = {
        "AutoRemove": True,
        "CapDrop": ["ALL"],
        "CgroupnsMode": "private",
        "IpcMode": "private",
        "LogConfig": {"Type": "none", "Config": {}},
        "Memory": memory,
        "MemorySwap": memory,
        "NanoCpus": int(min(spec.cpus, os.cpu_count() or spec.cpus) * 1e9),  # more than there are is refused
        "NetworkMode": "none",
        # gVisor's kernel is itself threads on the host; inside, it has a limit of its own
        "PidsLimit": limits.PROCESSES * (32 if spec.own_kernel else 1) + 1,
        "ReadonlyRootfs": True,
        "SecurityOpt": ["no-new-privileges:true"],
        "ShmSize": limits.MiB,
        "Tmpfs": {
            **{folder: f"{room(limits.VERIFIER)},{own}" for folder in layout.VERIFIER},
            "/tmp": f"{room(spec.disk)},{flags},mode=1777",
            spec.workdir: f"{room(spec.disk)},{own}",
        },
    }
    if spec.runtime is not None:
        host["Runtime"] = spec.runtime
    return {
        "Image": spec.image,
        "Entrypoint": [COMMAND[0]],
        "Cmd": list(COMMAND[1:]),
        "User": USER,
        "WorkingDir": spec.workdir,
        "Hostname": "sandbox",
        "Env": list(spec.env),
        "Labels": spec.labels,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "OpenStdin": True,
        "StdinOnce": True,
        "StopTimeout": 0,
        "HostConfig": host,
    }


class Attached:
    """The connection to a container's standard input and output; a ``client.Connection``."""

    def __init__(self, raw: Any):
        self._raw = raw
        self._sock: socket.socket = getattr(raw, "_sock", raw)
        self._header = bytearray()
        self._left = 0
        self._is_output = False
        self.errors = b""
        """The end of what came on standard error."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def recv(self, size: int, /) -> bytes:
        """Bytes of the standard output; none at the end of the container."""
        while True:
            wanted = min(size, self._left) or _FRAME - len(self._header)
            data = self._sock.recv(wanted)
            if not data:
                return b""
            if not self._left:
                self._header += data
                if len(self._header) == _FRAME:
                    self._left = int.from_bytes(self._header[4:], "big")
                    self._is_output = self._header[0] == _STDOUT
                    self._header.clear()
                continue
            self._left -= len(data)
            if self._is_output:
                return data
            self.errors = (self.errors + data)[-_ERRORS:]

    def quiet(self) -> bool:
        """Whether nothing has come, not even the end."""
        return not select.select([self._sock], [], [], 0)[0]

    def sendall(self, data: bytes, /) -> None:
        self._sock.sendall(data)

    def gettimeout(self) -> float | None:
        return self._sock.gettimeout()

    def settimeout(self, seconds: float | None, /) -> None:
        self._sock.settimeout(seconds)

    def shutdown(self, how: int, /) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._raw.close()
        self._sock.close()


@dataclass(frozen=True, slots=True)
class Found:
    """A container that carries a label."""

    container: str
    labels: dict[str, str]
    running: bool
    created: float
    """Seconds since the epoch, by the engine's clock."""


class Engine:
    """A Docker engine, found as the ``docker`` command finds it. Threads may share it. ``SandboxDead``."""

    def __init__(self) -> None:
        with _as_dead("no Docker engine"):
            where = docker.utils.kwargs_from_env()
            _try_to_connect(where.get("base_url", docker.constants.DEFAULT_UNIX_SOCKET))
            self._api = docker.APIClient(
                version="auto", timeout=_TIMEOUT, max_pool_size=_CONNECTIONS, **where
            )
            self._api.trust_env = (
                False  # else each request reads the environment, which others may be changing
            )

    def runtimes(self) -> list[str]:
        """Names of the OCI runtimes that the engine knows."""
        with _as_dead("the engine does not answer"):
            return sorted(self._api.info()["Runtimes"])

    def find_image(self, image: str) -> dict[str, Any] | None:
        """What the engine knows of the image, if it is here."""
        with _as_dead("the engine does not answer"):
            try:
                found: dict[str, Any] = self._api.inspect_image(image)
            except docker.errors.ImageNotFound:
                return None
        return found

    def build(self, tag: str, *, folder: str | None = None, dockerfile: str = "") -> None:
        """Make an image from a folder with a Dockerfile, or from the text of one, which gets no network."""
        source: dict[str, Any] = {"path": folder}
        if folder is None:
            source = {"fileobj": io.BytesIO(dockerfile.encode()), "network_mode": "none"}
        with _as_dead(f"the image {tag} cannot be built"):
            steps = self._api.build(**source, tag=tag, rm=True, forcerm=True, decode=True, timeout=_BUILD)
            for step in steps:
                if "error" in step:
                    raise SandboxDead(f"the image {tag} cannot be built: {step['error'].strip()[-500:]}")

    def run(self, spec: ContainerSpec) -> tuple[str, Attached]:
        """Start a container; its id, and the connection to it. Nothing of it is left after a failure."""
        with _as_dead("the container did not start"):
            container: str = self._api.create_container_from_config(container_config(spec))["Id"]
            try:
                streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
                attached = Attached(self._api.attach_socket(container, params=streams))
                try:
                    self._api.start(container)
                except BaseException:
                    attached.close()
                    raise
            except BaseException:
                self.remove(container)
                raise
        return container, attached

    def remove(self, container: str) -> None:
        """Kill and remove a container; one that is gone, or being removed, is no failure."""
        with _as_dead("a container cannot be removed"):
            try:
                self._api.remove_container(container, force=True, v=True)
            except docker.errors.NotFound:
                return
            except docker.errors.APIError as error:
                if error.status_code != 409:
                    raise

    def find(self, label: str) -> list[Found]:
        """All containers, running or not, with the label ``name`` or ``name=value``."""
        with _as_dead("the engine does not answer"):
            rows = self._api.containers(all=True, filters={"label": label})
        return [
            Found(row["Id"], row.get("Labels") or {}, row["State"] == "running", float(row["Created"]))
            for row in rows
        ]

    def close(self) -> None:
        """Give the connections back."""
        self._api.close()


def _try_to_connect(url: str) -> None:
    """Fail at once when nobody listens on a local socket; the SDK would leave its own half-open. ``OSError``."""
    kind, _, path = url.partition("://")
    if kind in ("unix", "http+unix"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(_TIMEOUT)
            sock.connect("/" + path.lstrip("/"))


@contextlib.contextmanager
def _as_dead(what: str) -> Iterator[None]:
    try:
        yield
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise SandboxDead(f"{what}: {error}") from error
