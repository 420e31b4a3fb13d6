"""Replicas as Modal sandboxes, by the ``modal`` package.

A sandbox belongs to an account, not to this process: it goes on when this one dies, and a handle kept elsewhere is
good for another executor. It ends after its ``timeout_s`` at the latest; Modal allows a day.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from hintloop.learner.executors.protocol import (
    EXIT_KILLED,
    ExecutorError,
    ReplicaHandle,
    ReplicaResult,
    ReplicaSpec,
    ReplicaState,
    Unreachable,
    explain,
    secret_values,
)
from hintloop.learner.executors.remote import all_or_none, cancel_each, one_line
from hintloop.learner.executors.waiting import LINE_CHARS, collected, follow, within

TAG = "hintloop-launch"
CALL_S = 60.0
"""How long a call may take."""
LAUNCH_S = 1500.0
"""How long a sandbox may take to start: the image is fetched, and a GPU has to be free."""
_TAIL = 20
T = TypeVar("T")


class ModalClient(Protocol):
    """What is needed of Modal."""

    def create(self, image: str, spec: ReplicaSpec, *, secrets: Mapping[str, str], launch: str) -> str:
        """Start a sandbox; its id."""
        ...

    def launched(self, launch: str) -> list[str]:
        """The ids of those that run and were started with this ``launch``."""
        ...

    def poll(self, sandbox_id: str) -> int | None:
        """The exit code; None while it runs."""
        ...

    def lines(self, sandbox_id: str) -> Iterable[str]:
        """Its standard output from the beginning, until it ends."""
        ...

    def tail(self, sandbox_id: str) -> list[str]:
        """The last lines of that, as far as they are known."""
        ...

    def terminate(self, sandbox_id: str) -> None:
        """End it, if it runs."""
        ...


class ModalExecutor:
    """Starts each replica as a sandbox."""

    poll_s = 10.0

    def __init__(self, image: str, *, app: str = "hintloop", client: ModalClient | None = None) -> None:
        """``image``: in a registry, with the package in it. ``app``: what Modal shows the sandboxes under.
        ``client``: in place of Modal itself.

        ``ExecutorError`` when the package ``modal`` or a token is missing.
        """
        self._client = SdkClient(app) if client is None else client
        self._image = image
        self._cancelled: set[str] = set()
        self._ended: dict[str, ReplicaResult] = {}

    def launch_replicas(self, specs: Sequence[ReplicaSpec]) -> tuple[ReplicaHandle, ...]:
        """Start all, or none, one after another. They share a tag, ``hintloop-launch``."""
        secrets = [secret_values(spec.secrets) for spec in specs]
        launch = uuid.uuid4().hex
        return all_or_none(
            lambda: tuple(
                ReplicaHandle(self._create(spec, values, launch), spec.index)
                for spec, values in zip(specs, secrets, strict=True)
            ),
            lambda: self._cancel_launch(launch),
        )

    def poll(self, handle: ReplicaHandle) -> ReplicaState:
        """Where the sandbox is now."""
        return self._look(handle).state

    def stream_logs(self, handle: ReplicaHandle, *, timeout_s: float) -> Iterator[str]:
        """The lines that it writes, from its first; ends with it, or after ``timeout_s``."""
        lines = follow(lambda: self._client.lines(handle.id), timeout_s=timeout_s)
        return (line.rstrip("\r\n")[:LINE_CHARS] for line in lines)

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """End those that are not over."""
        cancel_each(handles, self.poll, self._cancel)

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout_s: float) -> tuple[ReplicaResult, ...]:
        """Wait until all are over, ``timeout_s`` at most; the results in the same order."""
        return collected(self._look, handles, timeout_s=timeout_s, poll_s=self.poll_s)

    def _create(self, spec: ReplicaSpec, secrets: dict[str, str], launch: str) -> str:
        return within(
            LAUNCH_S, lambda: self._client.create(self._image, spec, secrets=secrets, launch=launch)
        )

    def _look(self, handle: ReplicaHandle) -> ReplicaResult:
        if handle.id not in self._ended:
            code = within(CALL_S, lambda: self._client.poll(handle.id))
            if code is None:
                return ReplicaResult(handle.index, ReplicaState.RUNNING)
            self._ended[handle.id] = self._result(handle, code)
        return self._ended[handle.id]

    def _result(self, handle: ReplicaHandle, code: int) -> ReplicaResult:
        if code == 0:
            return ReplicaResult(handle.index, ReplicaState.SUCCEEDED, code)
        if handle.id in self._cancelled and code == EXIT_KILLED:
            return ReplicaResult(handle.index, ReplicaState.CANCELLED, code)
        try:
            tail = within(CALL_S, lambda: self._client.tail(handle.id))
        except ExecutorError as error:
            tail = [f"ended with exit code {code} (its log cannot be read: {error})"]
        said = next((line for line in reversed(tail) if line.strip()), "")
        return ReplicaResult(handle.index, ReplicaState.FAILED, code, explain(code, said))

    def _cancel(self, handle: ReplicaHandle) -> None:
        within(CALL_S, lambda: self._client.terminate(handle.id))
        self._cancelled.add(handle.id)

    def _cancel_launch(self, launch: str) -> None:
        """End also those whose start was not answered. One that cannot be found ends after its ``timeout_s``."""
        ids = within(CALL_S, lambda: self._client.launched(launch))
        self.cancel([ReplicaHandle(id, number) for number, id in enumerate(ids)])


class SdkClient:
    """Modal itself, by its package."""

    def __init__(self, app: str) -> None:
        """``ExecutorError`` when the package ``modal`` or a token is missing."""
        try:
            self._modal: Any = importlib.import_module("modal")
            config = importlib.import_module("modal.config").config
        except ImportError as error:
            raise ExecutorError(
                "sandboxes at Modal need the package modal: pip install 'hintloop[modal]'"
            ) from error
        if not (config.get("token_id") and config.get("token_secret")):
            raise ExecutorError(
                "sandboxes at Modal need a token: `modal setup`, or the variables MODAL_TOKEN_ID and "
                "MODAL_TOKEN_SECRET"
            )
        self._app = app

    def create(self, image: str, spec: ReplicaSpec, *, secrets: Mapping[str, str], launch: str) -> str:
        """Start a sandbox; its id."""
        modal = self._modal
        with self._translated():
            sandbox = modal.Sandbox.create(
                *spec.command,
                app=self._found_app(),
                image=modal.Image.from_registry(image).entrypoint([]),
                env=dict(spec.env),
                secrets=[modal.Secret.from_dict(dict(secrets))] if secrets else [],
                gpu=spec.hardware,
                volumes={path: modal.Volume.from_name(name) for path, name in spec.volumes.items()},
                timeout=max(1, round(spec.timeout_s)),
                tags={TAG: launch, "replica": str(spec.index)},
            )
        return str(sandbox.object_id)

    def launched(self, launch: str) -> list[str]:
        """The ids of those that run and were started with this ``launch``."""
        with self._translated():
            found = self._modal.Sandbox.list(app_id=self._found_app().app_id, tags={TAG: launch})
            return [str(each.object_id) for each in found]

    def poll(self, sandbox_id: str) -> int | None:
        """The exit code, 124 after ``timeout_s`` and 137 when it was terminated; None while it runs."""
        with self._translated():
            code: int | None = self._modal.Sandbox.from_id(sandbox_id).poll()
        return code

    def lines(self, sandbox_id: str) -> Iterator[str]:
        """Its standard output from the beginning, until it ends."""
        with self._translated():
            yield from self._modal.Sandbox.from_id(sandbox_id).stdout

    def tail(self, sandbox_id: str) -> list[str]:
        """The last lines of that, as far as they are known."""
        with self._translated():
            entries = list(self._modal.Sandbox.from_id(sandbox_id).logs.tail(_TAIL, source="stdout"))
        return "".join(each.message for each in entries).splitlines()

    def terminate(self, sandbox_id: str) -> None:
        """End it, if it runs."""
        with self._translated():
            self._modal.Sandbox.from_id(sandbox_id).terminate()

    def _found_app(self) -> Any:
        return self._modal.App.lookup(self._app, create_if_missing=True)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """What the package raises, as this package's own errors."""
        errors = self._modal.exception
        later = (
            errors.ServiceError,
            errors.InternalError,
            errors.ConnectionError,
            errors.TimeoutError,
            OSError,
        )
        try:
            yield
        except later as error:
            raise Unreachable(one_line(error)) from error
        except errors.Error as error:
            raise ExecutorError(one_line(error)) from error
