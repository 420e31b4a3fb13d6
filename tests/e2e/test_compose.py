"""The loop as services on a real Docker engine: it runs, ends, goes on after kills, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
SMALL = (
    "rollout.group_size=4",
    "rollout.groups_per_step=2",
    "rollout.episodes_in_flight=8",
    "rollout.engine_slots=8",
    "evaluation.num_tasks=2",
    "evaluation.in_flight=4",
    "evaluation.during=[]",
    "evaluation.temperatures=[1.0]",
    "learner.grad_norm_every=2",
)
PROFILES = ("cpu", "gpu", "teachers-demo", "minio")
UP_S, RUN_S, DOWN_S = 240.0, 420.0, 120.0
IMAGES = ("hintloop-app", "hintloop-sandbox")
VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)[:}]|^ +([A-Z][A-Z0-9_]+):(?: #|$)", re.MULTILINE)


def _lacks_compose(images: Sequence[str]) -> str | None:
    if subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=30).returncode:
        return "there is no Compose v2; .ci/compose gets it"
    for image in images:
        if subprocess.run(["docker", "image", "inspect", image], capture_output=True, timeout=30).returncode:
            return f"there is no image {image}; containers/build makes it"
    return None


def need(*images: str) -> None:
    """Skip where Compose or an image is missing."""
    if shutil.which("docker") is None:
        pytest.skip("there is no docker command")
    if reason := _lacks_compose(images):
        pytest.skip(reason)


@dataclass
class Project:
    """One run of compose.yaml under a name of its own."""

    name: str
    env: dict[str, str]

    def compose(self, *words: str, timeout: float = 60.0) -> str:
        command = ["docker", "compose", "--project-name", self.name, "--file", str(ROOT / "compose.yaml")]
        command += ["--env-file", "/dev/null", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=os.environ | self.env, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def up(self, *options: str) -> None:
        self.compose("up", "--detach", "--no-build", *options, timeout=UP_S)

    def state(self, service: str) -> dict[str, Any]:
        """What the engine says of a service's container; empty when there is none."""
        found = self.compose("ps", "--all", "--quiet", service).split()
        return inspect(found[0]) if found else {}

    def file(self, path: str) -> list[dict[str, Any]]:
        """A file of JSON lines in the run's folder."""
        with suppress(AssertionError):
            text = self.compose("exec", "-T", "view", "cat", f"/data/run/{path}")
            return [json.loads(line) for line in text.splitlines()]
        return []

    def version(self) -> int:
        return max((int(row["version"]) for row in self.file("metrics/learner.jsonl")), default=0)

    def wait(self, true: Callable[[], object], what: str, seconds: float = RUN_S) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                logs = self.compose("logs", "--no-color", "--tail", "15")
                pytest.fail(f"{what}: not within {seconds:g} s\n{self.compose('ps', '--all')}\n{logs}")
            time.sleep(1.0)

    def ended(self) -> bool:
        """Whether learner and rollout are done."""
        states = [self.state(service)["State"] for service in ("learner", "rollout")]
        return all(state["Status"] == "exited" and state["ExitCode"] == 0 for state in states)

    def sandboxes(self) -> list[str]:
        label = f"label=hintloop.proxy={self.name}"
        return docker("ps", "--all", "--quiet", "--no-trunc", "--filter", label).split()

    def down(self, *options: str) -> None:
        self.compose("--profile", "*", "down", "--timeout", "30", *options, timeout=DOWN_S)

    def left(self) -> list[str]:
        """Containers and networks of the project that are there."""
        label = f"label=com.docker.compose.project={self.name}"
        made = docker("ps", "--all", "--quiet", "--filter", label).split()
        return made + docker("network", "ls", "--quiet", "--filter", label).split() + self.sandboxes()


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], capture_output=True, text=True, timeout=60, check=True).stdout


def inspect(container: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(docker("inspect", container))[0]
    return found


@pytest.fixture
def project(request: pytest.FixtureRequest) -> Iterator[Project]:
    name = f"hintloop-test-{os.getpid()}"
    made = Project(
        name,
        {
            "HINTLOOP_VIEW_PORT": "0",
            "HINTLOOP_MAX_SESSIONS": "8",
            "HINTLOOP_TEACHERS_DEMO": "true",
            "COMPOSE_PROFILES": "teachers-demo",
        },
    )
    yield made
    made.down("--volumes")


def settings(steps: int) -> str:
    words = [f"--set {setting}" for setting in (*SMALL, f"learner.steps={steps}")]
    return " ".join(["--preset smoke", *words])


# The file itself


@pytest.mark.docker
@pytest.mark.parametrize("profiles", [(), *((name,) for name in PROFILES), PROFILES])
def test_the_file_is_valid(project: Project, profiles: tuple[str, ...]) -> None:
    need()
    chosen = [word for name in profiles for word in ("--profile", name)]
    project.env["COMPOSE_PROFILES"] = ""
    found = json.loads(project.compose(*chosen, "config", "--format", "json"))
    assert {"setup", "docker-proxy", "env", "rollout", "learner", "view"} <= found["services"].keys()
    for name, service in found["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["logging"]["options"]["max-size"], name
        assert service["pids_limit"] > 0, name
        ports = service.get("ports", [])
        assert not ports or (name == "view" and ports[0]["host_ip"] == "127.0.0.1"), name
        binds = [mount["source"] for mount in service.get("volumes", []) if mount["type"] == "bind"]
        assert binds == (["/var/run/docker.sock"] if name == "docker-proxy" else []), name
        assert name in ("setup", "view") or "outside" not in (service.get("networks") or {}), name
    assert found["networks"]["loop"]["internal"] is True


def test_every_variable_is_described() -> None:
    used = {first or second for first, second in VARIABLE.findall((ROOT / "compose.yaml").read_text())}
    described = set(re.findall(r"^#?([A-Z][A-Z0-9_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    given = {"COMPOSE_PROJECT_NAME", "VARIABLE"}
    assert used - given == described - {"COMPOSE_PROFILES"}


# The loop


@pytest.mark.docker
@pytest.mark.slow
def test_the_loop_runs_ends_and_leaves_nothing(project: Project) -> None:
    need(*IMAGES)
    project.env["HINTLOOP_SETTINGS"] = settings(4)
    project.up()
    project.wait(project.sandboxes, "a sandbox")
    host = inspect(project.sandboxes()[0])["HostConfig"]
    assert (host["NetworkMode"], host["ReadonlyRootfs"]) == ("none", True)
    port = project.compose("port", "view", "8010").strip()
    assert port.startswith("127.0.0.1:")
    with urllib.request.urlopen(f"http://{port}/", timeout=30) as page:
        assert b"Rollout: plays episodes" in page.read()
    project.wait(project.ended, "the end of the run")
    assert project.version() >= 3
    evaluations = project.file("evaluation.jsonl")
    assert {row["label"] for row in evaluations} == {"before", "after"}
    assert all(row["n"] == 2 for row in evaluations)
    project.down()
    assert project.left() == []


@pytest.mark.docker
@pytest.mark.slow
def test_each_service_may_be_killed_once(project: Project) -> None:
    need(*IMAGES)
    if os.geteuid() != 0:
        pytest.skip("killing a container's process from outside takes root")
    project.env["HINTLOOP_SETTINGS"] = settings(6)
    project.up()
    project.wait(lambda: project.version() > 0, "the first step")
    for service in ("env", "docker-proxy", "learner", "rollout", "teachers-demo", "view"):
        before = project.state(service)
        os.kill(before["State"]["Pid"], 9)

        def is_back(service: str = service, before: dict[str, Any] = before) -> bool:
            now = project.state(service)
            return bool(now["RestartCount"] > before["RestartCount"] and now["State"]["Running"])

        project.wait(is_back, f"{service} is back", 60)
    project.wait(project.ended, "the end of the run")
    trained = [group for row in project.file("trained.jsonl") for group in row["groups"]]
    assert len(trained) == len(set(trained)) == 6 * 2
    project.down()
    assert project.left() == []
