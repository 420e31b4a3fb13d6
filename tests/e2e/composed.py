"""One run of compose.yaml as a project of its own on the Docker engine."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).parent.parent.parent
Found = TypeVar("Found")
UP_S, RUN_S, DOWN_S, ASK_S = 600.0, 900.0, 300.0, 180.0


@dataclass
class Project:
    """``env`` are the variables that compose.yaml reads; ``files`` go on top of it."""

    name: str
    env: dict[str, str]
    files: tuple[str, ...] = ("compose.yaml",)

    def compose(self, *words: str, timeout: float = ASK_S) -> str:
        """What a command of Compose prints."""
        command = ["docker", "compose", "--project-name", self.name, "--env-file", "/dev/null"]
        command += [word for name in self.files for word in ("--file", str(ROOT / name))]
        done = subprocess.run(
            [*command, *words],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=os.environ | self.env,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def up(self, *words: str) -> None:
        """Start services, all by default, and wait until they are well."""
        self.compose("up", "--detach", "--no-build", *words, timeout=UP_S)

    def containers(self, service: str) -> list[dict[str, Any]]:
        """What the engine says of a service's containers, those that have ended too."""
        found = self.compose("ps", "--all", "--quiet", service).split()
        return [inspect(container) for container in found]

    def state(self, service: str) -> dict[str, Any]:
        """The same of the only one."""
        (found,) = self.containers(service)
        return found

    def file(self, path: str) -> str:
        """A file of the run's folder; empty when it is not there, or nobody is to ask."""
        with suppress(AssertionError):
            return self.compose("exec", "-T", "view", "cat", f"/data/run/{path}")
        return ""

    def lines(self, path: str) -> list[dict[str, Any]]:
        """One of JSON lines."""
        return [json.loads(line) for line in self.file(path).splitlines()]

    def version(self) -> int:
        """The newest weights that were published."""
        return max((int(row["version"]) for row in self.lines("metrics/learner.jsonl")), default=0)

    def running(self, service: str) -> dict[str, Any] | None:
        """``state`` of one that has a process; None while it starts again, or has ended."""
        found = self.state(service)
        return found if found["State"]["Pid"] else None

    def wait(self, true: Callable[[], Found | None], what: str, seconds: float = RUN_S) -> Found:
        """Until it is true; what it is then. Fails with what the services said last."""
        deadline = time.monotonic() + seconds
        while not (found := true()):
            if time.monotonic() > deadline:
                logs = self.compose("logs", "--no-color", "--tail", "15")
                pytest.fail(f"{what}: not within {seconds:g} s\n{self.compose('ps', '--all')}\n{logs}")
            time.sleep(1.0)
        return found

    def ended(self, *services: str) -> bool:
        """Whether these services are done, and well."""
        states = [self.state(service)["State"] for service in services]
        return all(state["Status"] == "exited" and state["ExitCode"] == 0 for state in states)

    def sandboxes(self) -> list[str]:
        """Ids of the sandboxes' containers."""
        label = f"label=hintloop.proxy={self.name}"
        return docker("ps", "--all", "--quiet", "--no-trunc", "--filter", label).split()

    def sandbox(self) -> dict[str, Any] | None:
        """What the engine says of a sandbox's container: the first that is still there when it is asked."""
        for container in self.sandboxes():
            with suppress(subprocess.CalledProcessError):
                return inspect(container)
        return None

    def down(self, *options: str) -> None:
        """Stop and remove everything; the volumes too with ``--volumes``."""
        self.compose("--profile", "*", "down", *options, timeout=DOWN_S)

    def left(self) -> list[str]:
        """Containers and networks of the project that are there."""
        label = f"label=com.docker.compose.project={self.name}"
        made = docker("ps", "--all", "--quiet", "--filter", label).split()
        return made + docker("network", "ls", "--quiet", "--filter", label).split() + self.sandboxes()


def docker(*words: str) -> str:
    """What a command of Docker prints."""
    return subprocess.run(
        ["docker", *words], capture_output=True, text=True, timeout=ASK_S, check=True
    ).stdout


def inspect(container: str) -> dict[str, Any]:
    """What the engine says of a container."""
    found: dict[str, Any] = json.loads(docker("inspect", container))[0]
    return found
