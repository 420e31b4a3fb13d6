"""The loop as services on a real Docker engine: it runs, ends, goes on after kills, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Iterator
from functools import partial
from ipaddress import ip_network

import pytest

from .composed import ROOT, Project, docker

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
STEPS = 4
"""Of the run whose services are killed: it has one when they are, and none is made while there is no engine."""
PROFILES = ("cpu", "gpu", "teachers-demo", "minio")
VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)[:}]|^ +([A-Z][A-Z0-9_]+):(?: #|$)", re.MULTILINE)


def make(name: str, *files: str) -> Project:
    env = {
        "COMPOSE_PROFILES": "teachers-demo",
        "HINTLOOP_VIEW_PORT": "0",
        "HINTLOOP_MAX_SESSIONS": "8",
        "HINTLOOP_TEACHERS_DEMO": "true",
    }
    return Project(f"hintloop-{name}-{os.getpid()}", env, ("compose.yaml", *files))


@pytest.fixture
def project() -> Iterator[Project]:
    made = make("test")
    yield made
    made.down("--volumes")


def settings(steps: int, *more: str) -> str:
    words = [f"--set '{setting}'" for setting in (*SMALL, f"learner.steps={steps}", *more)]
    return " ".join(["--preset smoke", *words])


def use_vllm(project: Project) -> None:
    project.env["COMPOSE_PROFILES"] += ",cpu"
    project.env["HINTLOOP_ENGINE_URL"] = "http://engine:8000"


def trained_groups(project: Project) -> list[str]:
    return [group for row in project.lines("trained.jsonl") for group in row["groups"]]


def trained_servers(project: Project) -> list[str]:
    """Inference servers that have weights from the learner."""
    said = json.loads(project.file("status/rollout.json") or "{}")
    return [server["url"] for server in said.get("servers", ()) if server["version"]]


def all_gone(project: Project) -> None:
    project.wait(lambda: not project.left(), "everything is removed")


# The file itself


@pytest.mark.compose
@pytest.mark.parametrize("profiles", [(), *((name,) for name in PROFILES), PROFILES])
def test_the_file_is_valid(project: Project, profiles: tuple[str, ...]) -> None:
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
    assert used - given == described - {"COMPOSE_PROFILES", "COMPOSE_FILE"}


# The loop


@pytest.mark.compose
@pytest.mark.slow
def test_the_loop_runs_ends_and_leaves_nothing(project: Project) -> None:
    """With two servers of vLLM, and two environment servers."""
    use_vllm(project)
    project.env["HINTLOOP_SETTINGS"] = settings(3)
    project.up("--scale", "engine=2", "--scale", "env=2")
    host = project.wait(project.sandbox, "a sandbox")["HostConfig"]
    assert (host["NetworkMode"], host["ReadonlyRootfs"]) == ("none", True)
    port = project.compose("port", "view", "8010").strip()
    assert port.startswith("127.0.0.1:")
    with urllib.request.urlopen(f"http://{port}/", timeout=30) as page:
        assert b"Rollout: plays episodes" in page.read()
    project.wait(lambda: len(trained_servers(project)) == 2, "new weights on both servers")
    project.wait(lambda: project.ended("learner", "rollout"), "the end of the run")
    assert project.version() >= 3
    said = json.loads(project.file("status/rollout.json"))
    assert (said["version"], said["engine"]["turns"] > 0) == (project.version(), True)
    evaluations = project.lines("evaluation.jsonl")
    assert {row["label"] for row in evaluations} == {"before", "after"}
    assert all(row["n"] == 2 for row in evaluations)
    report = json.loads(project.compose("exec", "-T", "view", "hintloop", "report", "/data/run", "--json"))
    assert (report["finished"], report["weights"]["versions"]) == (True, project.version() + 1)
    project.compose("stop", "docker-proxy")
    assert project.ended("docker-proxy"), "it was told to end, and has removed what there was"
    project.down()
    all_gone(project)


@pytest.mark.compose
@pytest.mark.slow
def test_each_service_may_be_killed_once(project: Project) -> None:
    """The run is stopped in the middle, too, and taken up again."""
    if os.geteuid() != 0:
        pytest.skip("killing a container's process from outside takes root")
    use_vllm(project)
    project.env["HINTLOOP_SETTINGS"] = settings(STEPS, 'evaluation.splits=["heldmut"]')
    project.up()
    project.wait(lambda: project.version() > 0, "the first step")
    for service in ("engine", "env", "docker-proxy", "learner", "rollout", "teachers-demo", "view"):
        before = project.wait(partial(project.running, service), f"{service} runs")
        os.kill(before["State"]["Pid"], 9)

        def is_back(service: str = service, restarts: int = before["RestartCount"]) -> bool:
            now = project.running(service)
            return now is not None and now["RestartCount"] > restarts

        project.wait(is_back, f"{service} is back")
    project.down()
    all_gone(project)
    project.up()
    assert "holds a run, which goes on" in project.compose("logs", "setup")
    project.wait(lambda: project.ended("learner", "rollout"), "the end of the run")
    trained = trained_groups(project)
    assert len(trained) == len(set(trained)) == STEPS * 2


@pytest.fixture
def store() -> Iterator[str]:
    """URL of an S3-compatible server that containers reach, by the address that this machine has among them."""
    server_of = pytest.importorskip("moto.server", reason="needs moto, of the extra dev")
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs, of the extra dev")
    (network,) = json.loads(docker("network", "inspect", "bridge", "--format", "{{json .IPAM.Config}}"))
    # An engine that has just been installed does not name the gateway: it is the first address.
    gateway = network.get("Gateway") or next(ip_network(network["Subnet"]).hosts())
    server = server_of.ThreadedMotoServer(ip_address=str(gateway), port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    s3fs.S3FileSystem(key="testing", secret="testing", endpoint_url=url).mkdir("hintloop")
    yield url
    server.stop()


@pytest.mark.compose
@pytest.mark.slow
def test_learner_and_rollout_side_meet_at_a_store_only(store: str) -> None:
    """As on two hosts: networks, run folders and Docker projects of their own."""
    learner, player = (make(name, "containers/outside.yaml") for name in ("learner", "player"))
    for project in (learner, player):
        project.env |= {
            "HINTLOOP_SETTINGS": settings(3),
            "HINTLOOP_JOURNAL": "s3://hintloop/journal",
            "HINTLOOP_WEIGHTS": "s3://hintloop/weights",
            "AWS_ENDPOINT_URL": store,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
        }
    try:
        learner.up("learner")
        player.up("docker-proxy", "env", "teachers-demo", "rollout", "view")
        player.wait(lambda: player.ended("rollout") and learner.ended("learner"), "the end of the run")
        assert {row["label"] for row in player.lines("evaluation.jsonl")} == {"before", "after"}
        assert player.containers("learner") == learner.containers("rollout") == []
    finally:
        player.down("--volumes")
        learner.down("--volumes")
    for project in (player, learner):
        all_gone(project)
