"""``task.toml`` of a Harbor task directory (schema 1.4): every key is known, refused, or kept as it is.

Harbor's own package needs a newer Python than this one, so the reader is ours.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
DEFAULT_TURNS = 30

_Network = Literal["public", "no-network", "allowlist"]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TaskTable(_Table):
    """Who made what."""

    name: str = ""
    version: str = ""
    description: str = ""
    authors: list[Any] = []
    keywords: list[str] = []


class _Role(_Table):
    user: str | int | None = None
    network_mode: _Network | None = None
    allowed_hosts: list[str] = []


class AgentTable(_Role):
    """How long the agent may take; told, not enforced, for an episode here is bounded in turns."""

    timeout_sec: float | None = Field(default=None, gt=0)


class VerifierTable(_Role):
    """How the work is graded: always in a sandbox of its own, whatever ``environment_mode`` says."""

    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = {}
    environment_mode: Literal["shared", "separate"] | None = None
    environment: dict[str, Any] = {}
    collect: list[Any] = []


class EnvironmentTable(_Table):
    """What the sandbox is made of; ``None`` leaves the usual limit."""

    docker_image: str | None = None
    build_timeout_sec: float = 600.0
    os: str | None = None
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: int = 0
    gpu_types: list[str] | None = None
    network_mode: _Network | None = None
    allowed_hosts: list[str] = []
    healthcheck: Any = None
    workdir: str | None = None
    env: dict[str, str] = {}
    skills_dir: str | None = None
    mcp_servers: list[Any] = []


class SolutionTable(_Table):
    """What the reference solution finds in its environment."""

    env: dict[str, str] = {}


class Artifact(_Table):
    """A file or folder that is graded."""

    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None


class HintloopTable(_Table):
    """``[metadata.hintloop]``: what other tools ignore."""

    visible_tests: str | None = None
    """Command behind the agent's ``run_tests``; None: it has no such tool."""
    max_turns: int = Field(default=DEFAULT_TURNS, ge=1)


class Manifest(_Table):
    """The whole file."""

    schema_version: str = Field(default="1.4", validation_alias=AliasChoices("schema_version", "version"))
    task: TaskTable = TaskTable()
    metadata: dict[str, Any] = {}
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    artifacts: list[str | Artifact] = []
    steps: list[Any] = []
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    source: str | None = None

    @property
    def hintloop(self) -> HintloopTable:
        """The settings of this project alone."""
        return HintloopTable.model_validate(self.metadata.get("hintloop", {}))


def read_manifest(path: Path) -> Manifest:
    """The file's content. ``ValueError`` names what is wrong with it, or what of it cannot be had here."""
    try:
        manifest = Manifest.model_validate(tomllib.loads(path.read_text("utf-8")))
        _ = manifest.hintloop
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path.name}: {error}") from None
    except ValidationError as error:
        raise ValueError(f"{path.name}: {'; '.join(map(_problem, error.errors()))}") from None
    for key, is_there in _not_here(manifest).items():
        if is_there:
            raise ValueError(f"{path.name}: {key} is not supported")
    return manifest


def _problem(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    return f"{where}: {'unknown key' if error['type'] == 'extra_forbidden' else error['msg']}"


def _not_here(manifest: Manifest) -> dict[str, object]:
    """Key -> whether it asks for something that no sandbox here has."""
    environment, verifier, agent = manifest.environment, manifest.verifier, manifest.agent
    found: dict[str, object] = {
        f"schema_version {manifest.schema_version!r}": manifest.schema_version not in SCHEMAS,
        "steps": manifest.steps or manifest.multi_step_reward_strategy,
        "environment.gpus": environment.gpus or environment.gpu_types,
        f"environment.os {environment.os!r}": environment.os not in (None, "linux"),
        "environment.healthcheck": environment.healthcheck,
        "environment.skills_dir": environment.skills_dir,
        "environment.mcp_servers": environment.mcp_servers,
        "verifier.environment": verifier.environment,
        "verifier.collect": verifier.collect,
        "agent.user": agent.user is not None,
        "verifier.user": verifier.user is not None,
    }
    for name, table in (("agent", agent), ("verifier", verifier), ("environment", environment)):
        found[f"{name}.network_mode 'allowlist'"] = table.network_mode == "allowlist"
        found[f"{name}.allowed_hosts"] = table.allowed_hosts
    for name, env in (
        ("environment", environment.env),
        ("verifier", verifier.env),
        ("solution", manifest.solution.env),
    ):
        found[f"a variable of the server in {name}.env"] = any("${" in value for value in env.values())
    for artifact in manifest.artifacts:
        if isinstance(artifact, Artifact):
            odd = {"destination": artifact.destination not in (None, artifact.source)}
            odd |= {"exclude": bool(artifact.exclude), "service": artifact.service not in (None, "main")}
            found |= {f"artifacts.{key}": is_there for key, is_there in odd.items()}
    return found
