"""The proxy before a real engine: sandboxes work through it, the host is out of reach, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("docker", reason="the extra `docker` is not installed")

import docker

from hintloop.containers.docker_rules import OWNER
from hintloop.envs.sandbox.docker import IMAGE, DockerProvider

pytestmark = pytest.mark.docker
NAME = f"test-{os.getpid()}"
DEADLINE_S = 60
USE = """
import sys
from hintloop.envs.sandbox.docker import DockerProvider
provider = DockerProvider(pool=0)
sandbox = provider.start({})
print("started", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def socket() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)  # the proxy is another user when this one is root
        yield Path(folder) / "docker.sock"


def start(socket: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hintloop.containers.docker_proxy", "--name", NAME, "--listen", socket]
    process = subprocess.Popen(command)
    wait_until(lambda: socket.exists() or process.poll() is not None)
    assert process.poll() is None
    return process


@pytest.fixture
def proxy(socket: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{socket}")
    process = start(socket)
    yield process
    process.terminate()
    assert process.wait(DEADLINE_S) == 0
    assert containers() == []


def containers() -> list[str]:
    """Those that were made through the proxy, asked for past it."""
    command = ["docker", "ps", "--all", "--quiet", "--filter", f"label={OWNER}={NAME}"]
    environment = {name: value for name, value in os.environ.items() if name != "DOCKER_HOST"}
    asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    return asked.stdout.split()


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)


def test_sandboxes_work_through_the_proxy(proxy: subprocess.Popen[bytes]) -> None:
    with DockerProvider(pool=1) as provider:
        sandbox = provider.start({"a": "hello\n"})
        assert sandbox.exec("cat a; head -c 300000 /dev/zero | wc -c", timeout=20).output == "hello\n300000\n"
        other = sandbox.fork()
        assert other.read("a") == b"hello\n"
        assert len(containers()) >= 2
        sandbox.close()
        other.close()
    wait_until(lambda: containers() == [])


def test_other_uses_of_the_engine_are_refused(proxy: subprocess.Popen[bytes], socket: Path) -> None:
    client = docker.DockerClient(base_url=f"unix://{socket}", version="1.41")
    attempts: list[Callable[[], object]] = [
        lambda: client.containers.run(IMAGE, "true", volumes={"/": {"bind": "/host", "mode": "rw"}}),
        lambda: client.containers.run(IMAGE, "true", privileged=True),
        lambda: client.containers.run(IMAGE, "true"),
        lambda: client.images.pull("debian", tag="latest"),
        lambda: client.images.list(),
        lambda: client.networks.list(),
        lambda: client.volumes.create("x"),
        lambda: client.secrets.list(),
    ]
    for attempt in attempts:
        with pytest.raises(docker.errors.APIError, match="hintloop's proxy"):
            attempt()
    assert client.containers.list(all=True) == []
    client.close()


def test_containers_of_others_are_out_of_reach(proxy: subprocess.Popen[bytes], socket: Path) -> None:
    direct = docker.DockerClient(base_url="unix:///var/run/docker.sock")
    client = docker.APIClient(base_url=f"unix://{socket}", version="1.41")
    other = direct.containers.create(IMAGE, "true", network_mode="none")
    try:
        for attempt in (client.start, client.remove_container, client.attach_socket):
            with pytest.raises(docker.errors.NotFound):
                attempt(other.id)
        assert direct.containers.get(other.id).status == "created"
    finally:
        other.remove(force=True)
        client.close()
        direct.close()


def test_the_containers_of_a_killed_server_end(proxy: subprocess.Popen[bytes]) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    user = subprocess.Popen([sys.executable, "-c", USE], **pipes)
    assert user.stdout is not None
    assert user.stdout.readline() == b"started\n"
    assert len(containers()) == 1
    user.kill()
    user.communicate(timeout=DEADLINE_S)
    wait_until(lambda: containers() == [])


# the SDK leaves a socket open that it could not connect
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")
def test_a_proxy_that_was_killed_leaves_nothing_for_the_next(
    proxy: subprocess.Popen[bytes], socket: Path
) -> None:
    with DockerProvider(pool=0) as provider:
        provider.start({})
        create = ["docker", "create", "--label", f"{OWNER}={NAME}", "--network", "none", IMAGE, "true"]
        environment = {name: value for name, value in os.environ.items() if name != "DOCKER_HOST"}
        subprocess.run(create, check=True, timeout=60, capture_output=True, env=environment)
        proxy.send_signal(signal.SIGKILL)
        proxy.wait(DEADLINE_S)
        socket.unlink()
        second = start(socket)
        try:
            wait_until(lambda: containers() == [])
            provider.start({}).close()
        finally:
            second.terminate()
            assert second.wait(DEADLINE_S) == 0
    gc.collect()
    proxy.returncode = 0  # it was meant to end
