"""What only containers promise: their limits as the engine sees them, the pool, and that old ones are removed."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("docker", reason="the extra `docker` is not installed")

from hintloop.envs.dockerfile import image_tag
from hintloop.envs.grading import repository
from hintloop.envs.grading.grade import grade
from hintloop.envs.grading.handin import solved
from hintloop.envs.grading.result import Grade
from hintloop.envs.sandbox.base import Changes, SandboxDead, SandboxSpec, Status
from hintloop.envs.sandbox.docker import IMAGE, DockerProvider
from hintloop.envs.sandbox.docker_reaper import OWNER, own_identity
from hintloop.envs.task import RepositoryTests, Script, Task

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def provider() -> Iterator[DockerProvider]:
    with DockerProvider(pool=1) as made:
        yield made


def docker(*arguments: str) -> str:
    command = ["docker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def containers(label: str) -> list[str]:
    return docker("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={label}").split()


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def soon_ready(provider: DockerProvider, count: int) -> bool:
    return soon(lambda: provider.num_ready() == count)


def stock(provider: DockerProvider) -> str:
    """The one container of its pool; those of closed sandboxes take a while to go."""
    own = f"hintloop.sandbox.run={provider.run_id}"
    assert soon_ready(provider, 1)
    assert soon(lambda: len(containers(own)) == 1)
    return containers(own)[0]


def test_a_task_that_asks_for_more_processors_than_there_are_gets_these(provider: DockerProvider) -> None:
    sandbox = provider.start({}, SandboxSpec(cpus=1000.0))
    assert sandbox.exec("true", timeout=10).status is Status.OK
    sandbox.close()


def test_the_engine_enforces_every_limit(provider: DockerProvider) -> None:
    told: dict[str, Any] = json.loads(docker("inspect", stock(provider)))[0]
    host, config = told["HostConfig"], told["Config"]
    assert host["NetworkMode"] == "none"
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert host["Privileged"] is False
    assert any(option.startswith("no-new-privileges") for option in host["SecurityOpt"])
    assert host["Memory"] == host["MemorySwap"] > 0
    assert 0 < host["PidsLimit"] <= 100
    assert host["NanoCpus"] == 10**9
    assert host["LogConfig"]["Type"] == "none"
    assert host["AutoRemove"] is True
    assert not host["Binds"]
    assert not told["Mounts"]
    assert all("size=" in options for options in host["Tmpfs"].values())
    assert config["User"] == "65532:65532"
    assert config["StdinOnce"] is True
    assert not any("KEY" in line or "TOKEN" in line for line in config["Env"])


def test_a_start_takes_from_the_pool_and_the_pool_fills_again(provider: DockerProvider) -> None:
    ready = stock(provider)
    sandbox = provider.start({"a": "b"})
    assert soon_ready(provider, 1)
    sandbox.close()
    assert stock(provider) != ready, "another one was used"


def test_a_sandbox_that_died_in_the_pool_is_not_given_out(provider: DockerProvider) -> None:
    assert soon_ready(provider, 1)
    for container in containers(f"hintloop.sandbox.run={provider.run_id}"):  # some may be going already
        subprocess.run(["docker", "kill", container], capture_output=True, timeout=60, check=False)
    sandbox = provider.start({"a": "b"})
    assert sandbox.read("a") == b"b"
    sandbox.close()


def make_container(owner: str) -> str:
    return docker("create", "--label", f"{OWNER}={owner}", "--network", "none", IMAGE, "true").strip()


def test_containers_of_a_dead_owner_are_removed_and_others_are_left(provider: DockerProvider) -> None:
    host, boot, pid, started = own_identity().split()
    dead = [make_container(f"{host} {boot} {pid} 1"), make_container(f"{host} other-boot {pid} {started}")]
    alive = [make_container(own_identity()), make_container(f"elsewhere {boot} {pid} {started}")]
    try:
        DockerProvider(pool=0).close()
        left = containers(OWNER)
        assert not set(dead) & set(left)
        assert set(alive) <= set(left)
    finally:
        docker("rm", "--force", *alive)


def test_closing_a_sandbox_removes_its_container(provider: DockerProvider) -> None:
    with DockerProvider(pool=0) as fresh:
        sandbox = fresh.start({})
        assert len(containers(f"hintloop.sandbox.run={fresh.run_id}")) == 1
        sandbox.close()
        assert soon(lambda: containers(f"hintloop.sandbox.run={fresh.run_id}") == [])


def test_what_the_engine_lacks_is_told() -> None:
    with pytest.raises(SandboxDead, match="no image 'no-such-image'"):
        DockerProvider("no-such-image")
    with pytest.raises(SandboxDead, match="no runtime 'no-such-runtime'"):
        DockerProvider(runtime="no-such-runtime")


def test_an_engine_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(SandboxDead, match="no Docker engine"):
        DockerProvider()


# Images of tasks

DOCKERFILE = """\
FROM hintloop-sandbox
USER 0
ENV TOOL=yes PATH=/srv/own/bin:/usr/local/bin:/usr/bin:/bin
WORKDIR /srv/own
COPY data .
RUN mkdir bin && printf '#!/bin/sh\\necho tool\\n' > bin/tool && chmod 700 bin/tool && ln -s data link && mkdir /tests
"""


@pytest.fixture(scope="module")
def image_spec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxSpec]:
    folder = tmp_path_factory.mktemp("environment")
    (folder / "Dockerfile").write_text(DOCKERFILE)
    (folder / "data").write_text("1\n")
    tag = image_tag(folder)
    yield SandboxSpec(image=tag, context=str(folder), env={"OWN": "x"})
    subprocess.run(["docker", "rmi", "--force", tag], capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize("runtime", [None, "runsc"])
def test_the_image_of_a_task_gives_the_working_directory(
    runtime: str | None, image_spec: SandboxSpec
) -> None:
    with DockerProvider(runtime=runtime, pool=0) as provider:
        box = provider.start({"more/file": "2\n"}, image_spec)
        assert box.exec("pwd; echo $TOOL $OWN; tool; cat link /app/more/file", timeout=20).output == (
            "/srv/own\nyes x\ntool\n1\n2\n"
        )
        assert box.list_files() == ["bin/tool", "data", "more/file"]
        assert box.changes() == Changes([], [], 0)
        box.write("/srv/own/data", b"3\n")
        assert box.exec("rm bin/tool; echo 4 > bin/new; ls -A /tests", timeout=20).output == ""
        other = box.fork()
        box.close()
        assert other.exec("cat link bin/new; echo $TOOL $OWN", timeout=20).output == "3\n4\nyes x\n"
        assert other.changes() == Changes(["bin/new", "data"], ["bin/tool"], 0)
        assert other.exec("echo x > /srv/x || echo x > /usr/x", timeout=20).status is Status.NONZERO
        assert other.exec("head -c 80M /dev/zero > big", timeout=60).status is Status.NONZERO
        other.close()
        again = provider.start({}, image_spec)
        assert again.read("data") == b"1\n"
        again.close()


def test_an_image_that_is_missing_or_cannot_be_built_is_told(
    provider: DockerProvider, tmp_path: Path
) -> None:
    with pytest.raises(SandboxDead, match="no image 'no-such-image:1'"):
        provider.start({}, SandboxSpec(image="no-such-image:1"))
    (tmp_path / "Dockerfile").write_text("FROM hintloop-sandbox\nRUN false\n")
    with pytest.raises(SandboxDead, match="cannot be built"):
        provider.start({}, SandboxSpec(image="hintloop-task:broken", context=str(tmp_path)))


def test_a_task_with_an_image_is_graded_in_it(provider: DockerProvider, image_spec: SandboxSpec) -> None:
    script = Script(
        {"test.sh": '[ "$(cat data)" = "2" ] && [ ! -e bin/tool ] && echo 1 > /logs/verifier/reward.txt\n'},
        "sh /tests/test.sh",
    )
    solution = Script({"n": "2\n"}, "cp /solution/n data && rm bin/tool")
    task = Task("image/one", "-", {}, RepositoryTests(script), solution, sandbox=image_spec)
    files = solved(provider, task)
    assert files == {"data": "2\n", "bin/tool": None}
    assert grade(provider, task, files) == Grade(1.0, {"tests": 1.0})
    assert grade(provider, task, {}).reward == 0.0
    assert repository.canary_works(provider, task)
