"""Any OpenEnv program can use the environment: its validator, its generic client, its web page."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from openenv.cli.commands.validate import validate
from openenv.core.containers.runtime._server_config import parse_openenv_app_field
from openenv.core.generic_client import GenericEnvClient
from openenv.validation import Level, run_validation
from openenv.validation.providers.docker import DockerRunningSubject, DockerValidationProvider
from openenv.validation.runtime.contracts import LaunchSpec
from openenv.validation.types import ProviderCapability
from starlette.testclient import TestClient
from typer.testing import CliRunner

from hintloop.envs.sandbox.local import LocalProvider
from hintloop.envs.server import create_server_app, local_app
from hintloop.envs.tools import TOOLS

from .serving import MENDED, PATH, TASK, serving

MEND = {"name": "write_file", "arguments": {"path": PATH, "content": MENDED}}
URL_CRITERIA = [
    "openapi_version_available",
    "health_endpoint",
    "metadata_endpoint",
    "schema_endpoint",
    "mcp_endpoint",
    "mode_endpoint_consistency",
]
openenv_app = typer.Typer()
openenv_app.command()(validate)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("openenv")) as running:
        yield running


@pytest.fixture(scope="module")
def web_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("web"), "--web") as running:
        yield running


def validated(*arguments: str) -> dict[str, Any]:
    """The report of `openenv validate`, which must succeed."""
    ran = CliRunner().invoke(openenv_app, [*arguments, "--json"])
    assert ran.exit_code == 0, ran.output
    report: dict[str, Any] = json.loads(ran.stdout)
    return report


def test_the_package_passes_the_static_level(repository: Path) -> None:
    report = validated(str(repository / "envs"), "--level", "static")
    assert report["levels_run"] == [Level.STATIC]
    assert {check["check_id"]: check["status"] for check in report["results"]} == {"static.manifest": "pass"}
    assert report["verdict"] == "pass"


def test_a_running_server_passes_every_criterion(url: str) -> None:
    report = validated("--url", url)
    assert [check["id"] for check in report["criteria"]] == URL_CRITERIA
    assert [check["id"] for check in report["criteria"] if not check["passed"]] == []
    assert report["mode"] == "simulation"
    assert report["passed"]


@dataclass(frozen=True)
class Running:
    """A validation provider, and its subject: a server that runs already, so there is nothing to build."""

    base_url: str
    name: str = "running"
    capabilities: frozenset[ProviderCapability] = frozenset({ProviderCapability.IMAGE_BUILD})
    supported_network_modes: frozenset[str] = frozenset({"no-network"})

    def build(self, root: Path, execution: object) -> str:
        return "sha256:" + "0" * 64

    def start(self, spec: object) -> Running:
        return self

    def inspect(self) -> dict[str, Any]:
        return {}

    def stop(self) -> None:
        """The server goes on."""


NOT_IMPLEMENTED = "grader not implemented in this build"
"""OpenEnv's own words for what it does not check yet."""
CHECKED = {
    "static.manifest",
    "runtime.startup",
    "runtime.reward_well_formed",
    "runtime.observation_schema",
    "runtime.state_contract",
}
openenv_never_closes = pytest.mark.filterwarnings(
    "ignore:connect.. must be used as a context manager:DeprecationWarning"
)


def checks(report: Any) -> tuple[set[str], set[str]]:
    """Those that pass, and why the others do not."""
    passed = {check.check_id for check in report.results if check.status.value == "pass"}
    return passed, {check.evidence[0] for check in report.results if check.check_id not in passed}


@openenv_never_closes
def test_the_runtime_level_passes_all_that_it_checks(url: str, repository: Path) -> None:
    report = run_validation(repository / "envs", max_level=Level.RUNTIME, provider=Running(url))
    assert report.levels_run == [Level.STATIC, Level.RUNTIME]
    reasons = {NOT_IMPLEMENTED, "missing provider capabilities: network_policy"}
    assert checks(report) == (CHECKED, reasons)


class Patient(DockerValidationProvider):
    """Gives a server as long to start as OpenEnv allows, for a busy machine."""

    def start(self, spec: LaunchSpec) -> DockerRunningSubject:
        return super().start(spec.model_copy(update={"startup_timeout_s": 300.0}))


@pytest.mark.compose
@openenv_never_closes
def test_the_package_passes_the_runtime_level_in_openenvs_own_container(repository: Path) -> None:
    provider = Patient()
    provider.helper_image = "hintloop-sandbox"  # has a Python as OpenEnv's has, which is on a registry
    report = run_validation(repository / "envs", max_level=Level.RUNTIME, provider=provider)
    assert checks(report) == ({*CHECKED, "runtime.network_policy"}, {NOT_IMPLEMENTED})
    (startup,) = [check for check in report.results if check.check_id == "runtime.startup"]
    subprocess.run(["docker", "rmi", "--force", startup.measured["image_ref"]], check=True, timeout=60)


@pytest.mark.slow
def test_the_console_script_says_the_same(url: str, repository: Path) -> None:
    for arguments in (["envs", "--level", "static"], ["--url", url]):
        command = [str(Path(sys.executable).with_name("openenv")), "validate", *arguments]
        ran = subprocess.run(
            command, cwd=repository, capture_output=True, text=True, timeout=120, check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert "Verdict: PASS" in ran.stdout
        assert "FAIL" not in ran.stdout


def test_the_manifest_says_what_is_there(repository: Path) -> None:
    manifest = validated(str(repository / "envs"), "--level", "static")["manifest"]
    assert manifest["version"] == version("hintloop")
    assert manifest["capabilities"]["declared_tools"] == list(TOOLS)
    app = parse_openenv_app_field((repository / "envs/openenv.yaml").read_text())
    assert app == f"{local_app.__module__}:{local_app.__name__}"


def test_openenvs_generic_client_plays_an_episode(url: str) -> None:
    with GenericEnvClient(base_url=url).sync() as env:
        first = env.reset(task_id=TASK.task_id)
        assert first.observation["task"]["instruction"] == TASK.instruction
        assert first.reward is None
        failing = env.step({"name": "run_tests", "arguments": {}})
        assert failing.observation["error"]["kind"] == "test_failure"
        env.step(MEND)
        last = env.step({"name": "submit"})
        state = env.state()
    assert last.done
    assert last.reward == 1.0
    assert state["task_id"] == TASK.task_id
    assert state["step_count"] == 3


def test_a_reset_without_a_task_id_draws_from_the_first_tasks_given(url: str) -> None:
    with GenericEnvClient(base_url=url).sync() as env:
        assert env.reset().observation["task"]["task_id"] == TASK.task_id


@pytest.mark.parametrize("number", range(3))
def test_the_examples_of_the_docs_run(url: str, repository: Path, number: int) -> None:
    text = (repository / "docs/environment.md").read_text().replace("http://127.0.0.1:8000", url)
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 3
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(examples[number], f"example {number}", "exec"), {})
    assert output.getvalue().count("\n") >= 3


def test_a_host_can_start_it_as_the_manifest_says(repository: Path) -> None:
    app = parse_openenv_app_field((repository / "envs/openenv.yaml").read_text())
    assert app is not None
    command = [sys.executable, "-m", "uvicorn", app, "--factory", "--port", "0"]
    process = subprocess.Popen(command, cwd=repository / "envs", stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "running on" in line)
        assert call(line.split("running on ")[1].split()[0] + "/health")["status"] == "healthy"
    finally:
        process.kill()
        process.communicate()


def call(url: str, body: dict[str, Any] | None = None, origin: str | None = None) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Origin": origin} if origin else {})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as response:
        assert response.status == 200
        text = response.read().decode()
        return json.loads(text) if "json" in response.headers["Content-Type"] else text


def test_the_web_page_answers_and_plays_an_episode(web_url: str) -> None:
    assert "gradio" in call(f"{web_url}/web/")
    first = call(f"{web_url}/web/reset", {"task_id": TASK.task_id}, origin=web_url)
    assert first["observation"]["task"]["task_id"] == TASK.task_id
    call(f"{web_url}/web/step", {"action": MEND}, origin=web_url)
    last = call(f"{web_url}/web/step", {"action": {"name": "submit", "arguments": {}}}, origin=web_url)
    assert last["reward"] == 1.0
    assert call(f"{web_url}/web/state")["step_count"] == 2
    assert call(f"{web_url}/web/reset", {}, origin=web_url)["observation"]["task"]["task_id"] == TASK.task_id


def test_pages_of_other_hosts_cannot_use_the_web_page(web_url: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="403"):
        call(f"{web_url}/web/reset", {}, origin="http://evil.example")


def test_without_the_flag_there_is_no_web_page(url: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        call(f"{url}/web/")


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("10.0.0.5", "http://10.0.0.5:8000", 200),
        ("10.0.0.5", "http://evil.example", 403),
        ("127.0.0.1", "http://10.0.0.5:8000", 403),
    ],
)
def test_pages_of_the_host_that_is_served_may_connect(host: str, origin: str, status: int) -> None:
    with LocalProvider() as provider:
        client = TestClient(create_server_app(provider, host=host))
        assert client.get("/health", headers={"Origin": origin}).status_code == status
