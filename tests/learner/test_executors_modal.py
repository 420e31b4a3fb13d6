"""Replicas as Modal sandboxes: against a client that scripts them; and our calls against the package's signatures."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hintloop.learner.executors.modal_sandbox import TAG, ModalClient, ModalExecutor, SdkClient
from hintloop.learner.executors.protocol import (
    ExecutorError,
    ReplicaResult,
    ReplicaSpec,
    ReplicaState,
    Unreachable,
)
from hintloop.learner.executors.run import run_replicas

IMAGE = "registry.example/hintloop-app"
WAIT_S = 30.0
FULL = ReplicaSpec(
    1,
    ("python", "-m", "module"),
    timeout_s=60.4,
    env={"A": "b"},
    secrets=("STORE_KEY",),
    hardware="A100",
    volumes={"/data": "volume"},
)


@dataclass
class Sandbox:
    """What a scripted sandbox answers: one of ``codes`` at each look, and the last for good."""

    codes: list[int | None]
    log: list[str] = field(default_factory=list)
    launch: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict)
    terminated: bool = False


class ScriptedModal:
    """A client of ours with sandboxes that go as they are told."""

    def __init__(self, *sandboxes: Sandbox | ExecutorError) -> None:
        self._next = list(sandboxes)
        self.started: list[Sandbox] = []
        self.failures: list[ExecutorError] = []
        self.released = threading.Event()

    def create(self, image: str, spec: ReplicaSpec, *, secrets: Mapping[str, str], launch: str) -> str:
        assert image == IMAGE
        sandbox = self._next.pop(0)
        if isinstance(sandbox, ExecutorError):
            raise sandbox
        sandbox.launch, sandbox.secrets = launch, secrets
        self.started.append(sandbox)
        return f"sb-{len(self.started) - 1}"

    def launched(self, launch: str) -> list[str]:
        return [f"sb-{i}" for i, s in enumerate(self.started) if s.launch == launch and not s.terminated]

    def poll(self, sandbox_id: str) -> int | None:
        if self.failures:
            raise self.failures.pop(0)
        sandbox = self._found(sandbox_id)
        return sandbox.codes.pop(0) if len(sandbox.codes) > 1 else sandbox.codes[0]

    def lines(self, sandbox_id: str) -> Iterator[str]:
        sandbox = self._found(sandbox_id)
        yield from sandbox.log
        if sandbox.codes == [None]:
            self.released.wait(WAIT_S)

    def tail(self, sandbox_id: str) -> list[str]:
        if self.failures:
            raise self.failures.pop(0)
        return [line.rstrip("\n") for line in self._found(sandbox_id).log]

    def terminate(self, sandbox_id: str) -> None:
        sandbox = self._found(sandbox_id)
        sandbox.codes, sandbox.terminated = [137], True

    def _found(self, sandbox_id: str) -> Sandbox:
        return self.started[int(sandbox_id.removeprefix("sb-"))]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModalExecutor, "poll_s", 0.01)
    monkeypatch.setenv("STORE_KEY", "of-nobody's-business")


def executor(*sandboxes: Sandbox | ExecutorError) -> tuple[ModalExecutor, ScriptedModal]:
    modal = ScriptedModal(*sandboxes)
    client: ModalClient = modal
    return ModalExecutor(IMAGE, client=client), modal


def specs(count: int) -> list[ReplicaSpec]:
    return [ReplicaSpec(index, ("python",), timeout_s=60.0, secrets=("STORE_KEY",)) for index in range(count)]


def test_how_each_ended_is_collected() -> None:
    modal, client = executor(
        Sandbox([None, None, 0]),
        Sandbox([2], ["step 1\n", "hintloop: error: no journal\n", "\n"]),
        Sandbox([124], ["step 1\n"]),
        Sandbox([137], ["step 1\n"]),
    )
    handles = modal.launch_replicas(specs(4))
    assert client.started[0].secrets == {"STORE_KEY": "of-nobody's-business"}
    assert modal.poll(handles[0]) is ReplicaState.RUNNING
    client.failures += [Unreachable("busy")]
    results = modal.collect(handles, timeout_s=WAIT_S)
    assert results == (
        ReplicaResult(0, ReplicaState.SUCCEEDED, 0),
        ReplicaResult(1, ReplicaState.FAILED, 2, "hintloop: error: no journal"),
        ReplicaResult(2, ReplicaState.FAILED, 124, "took longer than it may"),
        ReplicaResult(3, ReplicaState.FAILED, 137, "was killed by SIGKILL"),
    )


def test_a_failure_whose_log_cannot_be_read_is_a_failure() -> None:
    modal, client = executor(Sandbox([3]))
    handles = modal.launch_replicas(specs(1))
    taken = client.poll

    def poll(sandbox_id: str) -> int | None:
        code = taken(sandbox_id)
        client.failures.append(Unreachable("busy"))
        return code

    client.poll = poll  # type: ignore[method-assign]
    (result,) = modal.collect(handles, timeout_s=WAIT_S)
    assert (result.state, result.exit_code) == (ReplicaState.FAILED, 3)
    assert result.error == "ended with exit code 3 (its log cannot be read: busy)"


def test_cancelling_ends_sandboxes_that_are_not_over() -> None:
    modal, client = executor(Sandbox([None]), Sandbox([0]))
    handles = modal.launch_replicas(specs(2))
    modal.cancel(handles)
    assert [sandbox.terminated for sandbox in client.started] == [True, False]
    states = [result.state for result in modal.collect(handles, timeout_s=WAIT_S)]
    assert states == [ReplicaState.CANCELLED, ReplicaState.SUCCEEDED]


def test_all_are_started_or_none() -> None:
    modal, client = executor(Sandbox([None]), Sandbox([None]), ExecutorError("no such GPU"))
    modal.launch_replicas(specs(1))
    with pytest.raises(ExecutorError, match="no such GPU"):
        modal.launch_replicas(specs(2))
    assert [sandbox.terminated for sandbox in client.started] == [False, True]
    with pytest.raises(ExecutorError, match="the secret NO_SUCH_KEY is not set"):
        modal.launch_replicas([ReplicaSpec(0, ("python",), timeout_s=1.0, secrets=("NO_SUCH_KEY",))])


def test_logs_are_streamed_with_a_deadline() -> None:
    modal, client = executor(Sandbox([0], ["first\n", "x" * 10_000 + "\n"]), Sandbox([None], ["only\n"]))
    ended, running = modal.launch_replicas(specs(2))
    assert list(modal.stream_logs(ended, timeout_s=WAIT_S)) == ["first", "x" * 4096]
    assert list(modal.stream_logs(running, timeout_s=3.0)) == ["only"]
    client.released.set()


def test_sandboxes_run_from_start_to_end() -> None:
    modal, client = executor(Sandbox([None, None, 1], ["bad\n"]), Sandbox([None], ["good\n"]))
    said: list[str] = []
    threading.Timer(1.0, client.released.set).start()
    results = run_replicas(modal, specs(2), timeout_s=WAIT_S, together=True, say=said.append)
    assert [result.state for result in results] == [ReplicaState.FAILED, ReplicaState.CANCELLED]
    assert sorted(said) == ["replica 0 | bad", "replica 1 | good"]


class Recorder:
    """Stands for the package: notes each call by its dotted name, and gives another recorder."""

    def __init__(self, name: str, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
        self._name, self._calls = name, calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(f"{self._name}.{name}", self._calls)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        name = self._name.removeprefix("modal.")
        self._calls.append((name, arguments, keywords))
        return [] if name.endswith(("list", "tail")) else Recorder(RESULTS.get(name, name), self._calls)

    def __iter__(self) -> Iterator[str]:
        return iter(["a line\n"])


RESULTS = {
    "App.lookup": "App",
    "Sandbox.create": "Sandbox",
    "Sandbox.from_id": "Sandbox",
    "Image.from_registry": "Image",
}
"""What a call gives, where that is used further."""


class _Error(Exception):
    pass


class _ServiceError(_Error):
    pass


def package(monkeypatch: pytest.MonkeyPatch, *, token: str | None = "ak-of-the-test") -> Any:
    """In place of ``modal``: a module whose calls are recorded."""
    calls: list[Any] = []
    module: Any = ModuleType("modal")
    for name in ("App", "Image", "Sandbox", "Secret", "Volume"):
        setattr(module, name, Recorder(name, calls))
    later = dict.fromkeys(("ServiceError", "InternalError", "ConnectionError", "TimeoutError"), _ServiceError)
    module.exception = SimpleNamespace(Error=_Error, **later)
    module.calls = calls
    config: Any = ModuleType("modal.config")
    config.config = {"token_id": token, "token_secret": token}
    monkeypatch.setitem(sys.modules, "modal", module)
    monkeypatch.setitem(sys.modules, "modal.config", config)
    return module


def made_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Every call that ``SdkClient`` makes."""
    with monkeypatch.context() as patch:
        module = package(patch)
        client: ModalClient = SdkClient("app")
        client.create(IMAGE, FULL, secrets={"STORE_KEY": "x"}, launch="l")
        client.launched("l")
        client.poll("sb-1")
        assert list(client.lines("sb-1")) == ["a line\n"]
        assert client.tail("sb-1") == []
        client.terminate("sb-1")
    return list(module.calls)


def test_a_sandbox_is_what_its_spec_says(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: (arguments, keywords) for name, arguments, keywords in made_calls(monkeypatch)}
    arguments, keywords = made["Sandbox.create"]
    assert arguments == ("python", "-m", "module")
    plain = {name: keywords[name] for name in ("env", "gpu", "timeout", "tags")}
    assert plain == {"env": {"A": "b"}, "gpu": "A100", "timeout": 60, "tags": {TAG: "l", "replica": "1"}}
    assert list(keywords["volumes"]) == ["/data"]
    assert made["Image.from_registry"] == ((IMAGE,), {})
    assert made["Image.entrypoint"] == (([],), {}), "the image's own would get our command as its arguments"
    assert made["Secret.from_dict"] == (({"STORE_KEY": "x"},), {})
    assert made["App.lookup"] == (("app",), {"create_if_missing": True})


def test_errors_of_the_package_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    module = package(monkeypatch)
    client = SdkClient("app")
    for error, kind in ((_ServiceError("busy"), Unreachable), (_Error("never"), ExecutorError)):

        def fail(*_: Any, error: Exception = error) -> None:
            raise error

        module.Sandbox = SimpleNamespace(from_id=fail)
        with pytest.raises(kind, match=f"{type(error).__name__}: {error}") as raised:
            client.poll("sb-1")
        assert type(raised.value) is kind


def test_what_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch, token=None)
    with pytest.raises(ExecutorError, match=r"need a token: `modal setup`, or .* MODAL_TOKEN_SECRET$"):
        ModalExecutor(IMAGE)
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(ExecutorError, match=r"need the package modal: pip install 'hintloop\[modal\]'$"):
        ModalExecutor(IMAGE)


def test_calls_fit_the_package_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    modal = pytest.importorskip("modal", reason="needs modal, of the extra modal")
    logs = importlib.import_module("modal._logs_manager").SandboxLogsManager
    calls = made_calls(monkeypatch)
    assert len({name for name, *_ in calls}) == 11
    for name, arguments, keywords in calls:
        found: Any = modal
        for part in name.split("."):
            found = logs if part == "logs" else getattr(found, part)
        bound_to = [None] if name in ("Sandbox.poll", "Sandbox.terminate", "Image.entrypoint") else []
        bound_to += [None] if name.endswith("logs.tail") else []
        inspect.signature(found).bind(*bound_to, *arguments, **keywords)
    for attribute in ("object_id", "stdout", "logs"):
        assert isinstance(getattr(modal.Sandbox, attribute), property)
    assert isinstance(modal.App.app_id, property)
    for error in ("Error", "ServiceError", "InternalError", "ConnectionError", "TimeoutError"):
        assert issubclass(getattr(modal.exception, error), modal.exception.Error)
    modal.Image.from_registry(IMAGE).entrypoint([])
    modal.Secret.from_dict({"STORE_KEY": "x"})
    modal.Volume.from_name("volume")
