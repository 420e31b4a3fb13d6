"""What passes the proxy before the Docker engine: what sandboxes need, and nothing that was changed in it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintloop.containers.docker_rules import OWNER, Limits, Refused, of_engine, understand

pytest.importorskip("docker", reason="the extra `docker` is not installed")

from hintloop.envs.sandbox.docker_engine import ContainerSpec, container_config

LIMITS = Limits("mine")
ID = "0123456789abcdef" * 4
SPEC = ContainerSpec(
    image="hintloop-sandbox",
    runtime=None,
    workdir="/workspace",
    memory=256 << 20,
    disk=64 << 20,
    cpus=1.0,
    labels={"hintloop.sandbox.run": "x"},
    env=("PATH=/usr/bin",),
)


def create(wanted: object, limits: Limits = LIMITS) -> dict[str, Any]:
    body = json.dumps(wanted).encode()
    found: dict[str, Any] = json.loads(understand("POST", "/v1.41/containers/create", body, limits).body)
    return found


@pytest.fixture
def wanted() -> dict[str, Any]:
    return container_config(SPEC)


def test_what_a_sandbox_is_made_of_passes_and_gets_the_label(wanted: dict[str, Any]) -> None:
    sent = create(wanted)
    assert sent.pop("Labels") == {**wanted.pop("Labels"), OWNER: "mine"}
    assert sent == wanted


def test_a_sandbox_with_its_own_kernel_passes() -> None:
    wanted = container_config(ContainerSpec(**{**_values(SPEC), "runtime": "runsc"}))
    assert create(wanted)["HostConfig"]["Runtime"] == "runsc"


def _values(spec: ContainerSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in ContainerSpec.__dataclass_fields__}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("Binds", ["/:/host"]),
        ("binds", ["/:/host"]),
        ("Mounts", [{"Type": "bind", "Source": "/", "Target": "/host"}]),
        ("VolumesFrom", ["other"]),
        ("Privileged", True),
        ("privileged", True),
        ("CapAdd", ["SYS_ADMIN"]),
        ("Devices", [{"PathOnHost": "/dev/sda", "PathInContainer": "/dev/sda"}]),
        ("DeviceCgroupRules", ["a *:* rwm"]),
        ("PidMode", "host"),
        ("UTSMode", "host"),
        ("UsernsMode", "host"),
        ("Sysctls", {"kernel.shm_rmid_forced": "1"}),
        ("CgroupParent", "/"),
        ("Init", True),
        ("RestartPolicy", {"Name": "always"}),
        ("PortBindings", {"80/tcp": [{"HostPort": "80"}]}),
        ("NetworkMode", "host"),
        ("NetworkMode", "bridge"),
        ("NetworkMode", "container:other"),
        ("IpcMode", "host"),
        ("CgroupnsMode", "host"),
        ("CapDrop", []),
        ("CapDrop", ["all but some"]),
        ("SecurityOpt", ["no-new-privileges:true", "seccomp=unconfined"]),
        ("SecurityOpt", []),
        ("ReadonlyRootfs", False),
        ("ReadonlyRootfs", 1),
        ("AutoRemove", False),
        ("LogConfig", {"Type": "syslog", "Config": {"syslog-address": "tcp://elsewhere"}}),
        ("Memory", 0),
        ("Memory", 1 << 60),
        ("Memory", True),
        ("MemorySwap", -1),
        ("PidsLimit", -1),
        ("PidsLimit", 10**9),
        ("NanoCpus", 0),
        ("ShmSize", 1 << 60),
        ("Runtime", "other"),
        ("Tmpfs", {"/a:/host": "size=1"}),
        ("Tmpfs", {"/../a": "size=1"}),
        ("Tmpfs", {"/a": "size=1 --bind"}),
        ("Tmpfs", ["/a"]),
    ],
)
def test_what_reaches_the_host_is_refused(wanted: dict[str, Any], field: str, value: object) -> None:
    wanted["HostConfig"][field] = value
    with pytest.raises(Refused, match=field):
        create(wanted)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("Image", "debian"),
        ("Image", "hintloop-sandbox@sha256:0"),
        ("Image", 3),
        ("User", ""),
        ("User", "0:0"),
        ("User", "root"),
        ("User", "65532"),
        ("User", "065532:0"),
        ("Volumes", {"/data": {}}),
        ("NetworkingConfig", {"EndpointsConfig": {"loop": {}}}),
        ("ExposedPorts", {"80/tcp": {}}),
        ("StdinOnce", False),
        ("Healthcheck", {"Test": ["CMD", "true"]}),
        ("Env", "A=b"),
        ("Labels", {"a": 1}),
        ("HostConfig", None),
    ],
)
def test_other_containers_than_sandboxes_are_refused(
    wanted: dict[str, Any], field: str, value: object
) -> None:
    wanted[field] = value
    with pytest.raises(Refused):
        create(wanted)


def test_the_label_cannot_be_chosen(wanted: dict[str, Any]) -> None:
    wanted["Labels"] = {OWNER: "another's"}
    assert create(wanted)["Labels"] == {OWNER: "mine"}


def test_nothing_may_be_left_out(wanted: dict[str, Any]) -> None:
    for part in (wanted, wanted["HostConfig"]):
        for field in part.keys() - {"Runtime"}:
            changed = copy.deepcopy(wanted)
            del (changed if part is wanted else changed["HostConfig"])[field]
            with pytest.raises(Refused, match="is missing"):
                create(changed)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(name=st.text(max_size=12), value=_JSON, deep=st.booleans())
def test_a_field_that_has_no_rule_never_travels(name: str, value: object, deep: bool) -> None:
    wanted = container_config(SPEC)
    part = wanted["HostConfig"] if deep else wanted
    if name in part or name == "Runtime":
        return
    part[name] = value
    with pytest.raises(Refused):
        create(wanted)


@given(body=_JSON)
def test_any_other_body_is_refused(body: object) -> None:
    with pytest.raises(Refused):
        create(body)


def test_a_body_that_is_no_json_is_refused() -> None:
    for body in (b"", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(Refused):
            understand("POST", "/containers/create", body, LIMITS)


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/containers/json/"),
        ("GET", f"/containers/{ID}/archive?path=/"),
        ("GET", f"/containers/{ID}/json"),
        ("GET", f"/containers/{ID}/logs"),
        ("GET", "/images/json"),
        ("GET", "/images/debian/json"),
        ("GET", "/images/hintloop-sandbox%2F..%2F..%2Finfo/json"),
        ("GET", "/secrets"),
        ("GET", "/events"),
        ("GET", "//info"),
        ("GET", "/v1.41/../info"),
        ("GET", "http://elsewhere/info?x=1"),
        ("POST", "/build"),
        ("POST", "/commit"),
        ("POST", "/images/create?fromImage=debian"),
        ("POST", f"/containers/{ID}/exec"),
        ("POST", f"/containers/{ID}/update"),
        ("POST", "/containers/prune"),
        ("POST", f"/containers/{ID[:12]}/start"),
        ("POST", "/containers/some-name/start"),
        ("POST", f"/containers/{ID}%2F..%2Fx/start"),
        ("POST", f"/containers/{ID}/start?detachKeys=x"),
        ("POST", "/containers/create?name=x"),
        ("DELETE", "/containers/some-name"),
        ("DELETE", f"/containers/{ID}?link=1"),
        ("DELETE", "/volumes/data"),
        ("PUT", f"/containers/{ID}/archive?path=/"),
        ("HEAD", "/info"),
        ("get", "/info"),
        ("GET", "/info?a"),
        ("GET", "http://[/info"),
    ],
)
def test_other_requests_are_refused(method: str, target: str) -> None:
    with pytest.raises(Refused):
        understand(method, target, b"{}", LIMITS)


def test_a_start_with_settings_is_refused() -> None:
    with pytest.raises(Refused, match="no settings"):
        understand("POST", f"/containers/{ID}/start", b'{"Binds": ["/:/host"]}', LIMITS)


def test_only_own_containers_are_listed() -> None:
    target = '/v1.41/containers/json?all=1&limit=-1&filters={"label":["hintloop.sandbox.owner"]}'
    sent = understand("GET", target, b"", LIMITS)
    assert json.loads(sent.query["filters"]) == {"label": ["hintloop.sandbox.owner", f"{OWNER}=mine"]}
    for filters in ('{"name":["x"]}', '{"label":"x"}', "[]", "x"):
        with pytest.raises(Refused):
            understand("GET", f"/containers/json?filters={filters}", b"", LIMITS)


def test_a_container_of_a_request_is_named_for_the_check_of_its_owner() -> None:
    for method, target in (
        ("POST", f"/v1.41/containers/{ID}/start"),
        ("POST", f"/v1.41/containers/{ID}/attach?stdin=1&stdout=1&stderr=1&stream=1"),
        ("DELETE", f"/v1.41/containers/{ID}?force=True&v=True&link=False"),
    ):
        assert understand(method, target, b"", LIMITS).container == ID


def test_images_are_known_by_pattern() -> None:
    for name in ("hintloop-sandbox", "hintloop-sandbox:latest", "hintloop-prepared:0a1b"):
        sent = understand("GET", f"/v1.41/images/{name}/json", b"", LIMITS)
        assert sent.target == f"/v1.41/images/{name}/json"


def test_of_the_engine_only_its_runtimes_are_told() -> None:
    info = {"Name": "host", "Runtimes": {"runc": {"path": "runc"}}, "RegistryConfig": {}}
    assert of_engine(info) == {"Runtimes": {"runc": {}}}
