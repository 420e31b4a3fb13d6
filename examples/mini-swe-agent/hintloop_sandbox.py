"""mini-swe-agent's environment for hintloop: its commands run in the sandbox of the episode, not on this machine.

Needs nothing of hintloop: where the sandbox is, is in two environment variables.
"""

from __future__ import annotations

import json
import os
import platform
import urllib.request
from typing import Any

from minisweagent.exceptions import Submitted
from pydantic import BaseModel

FINISHED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
TIMEOUT_S = 3600.0
"""The sandbox has its own, shorter limit for a command."""


class SandboxConfig(BaseModel):
    """Nothing of it is needed; mini.yaml has some."""

    cwd: str = ""
    env: dict[str, str] = {}


class SandboxEnvironment:
    """Runs each command by one request."""

    def __init__(self, **settings: Any) -> None:
        self.config = SandboxConfig(**settings)

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        """The output and the exit status of a command. Raises ``Submitted`` when the work is done, or the turns are."""
        result = _call("bash", {"command": action.get("command", "")})
        status = result["exit_code"] if result["exit_code"] is not None else (1 if result["error"] else 0)
        lines = result["output"].lstrip().splitlines(keepends=True)
        if status == 0 and lines and lines[0].strip() == FINISHED:
            raise _ended("Submitted", "".join(lines[1:]))
        if result["done"]:
            raise _ended("EpisodeOver", "")
        return {"output": result["output"], "returncode": status, "exception_info": ""}

    def get_template_vars(self, **more: Any) -> dict[str, Any]:
        """What the prompts of mini.yaml ask for."""
        return {**self.config.model_dump(), **platform.uname()._asdict(), **more}

    def serialize(self) -> dict[str, Any]:
        """For the trajectory file."""
        return {"info": {"config": {"environment": self.config.model_dump(), "environment_type": "hintloop"}}}


def _ended(status: str, submission: str) -> Submitted:
    extra = {"exit_status": status, "submission": submission}
    return Submitted({"role": "exit", "content": submission, "extra": extra})


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": "Bearer " + os.environ["HINTLOOP_TOKEN"], "Content-Type": "application/json"}
    body = json.dumps({"name": name, "arguments": arguments}).encode()
    request = urllib.request.Request(os.environ["HINTLOOP_SANDBOX_URL"] + "/call", body, headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
        request, timeout=TIMEOUT_S
    ) as answer:
        result: dict[str, Any] = json.load(answer)
    return result
