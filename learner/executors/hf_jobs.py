"""Replicas as jobs at Hugging Face, by ``huggingface_hub``'s jobs API.

A job belongs to an account, not to this process: it goes on when this one dies, and a handle kept elsewhere is good
for another executor. It ends after its ``timeout_s`` at the latest.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from hintloop.learner.executors.protocol import (
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

STATES = {
    "SCHEDULING": ReplicaState.QUEUED,
    "RUNNING": ReplicaState.RUNNING,
    "COMPLETED": ReplicaState.SUCCEEDED,
    "ERROR": ReplicaState.FAILED,
    "CANCELED": ReplicaState.CANCELLED,
    "DELETED": ReplicaState.CANCELLED,
}
"""A job's stage -> its state; another stage is one that does not end it."""
LABEL = "hintloop-launch"
CALL_S = 60.0
"""How long a call may take; the client itself has no limit."""
_TAIL = 20
_EXIT_CODE = re.compile(r"exit code:? (\d+)", re.IGNORECASE)
T = TypeVar("T")


class HFJobsExecutor:
    """Starts each replica as a job in an image that has the package, such as ``containers/app.Dockerfile`` makes."""

    poll_s = 10.0

    def __init__(self, image: str, *, namespace: str | None = None, endpoint: str | None = None) -> None:
        """``namespace``: who pays; None: the owner of the token. ``endpoint``: another Hub.

        ``ExecutorError`` when ``huggingface_hub`` or a token is missing.
        """
        try:
            from huggingface_hub import HfApi, get_token
        except ImportError as error:
            raise ExecutorError(
                "jobs at Hugging Face need the package huggingface_hub: pip install 'hintloop[train]'"
            ) from error
        token = get_token()
        if token is None:
            raise ExecutorError(
                "jobs at Hugging Face need a token: `hf auth login`, or the variable HF_TOKEN"
            )
        self._api = HfApi(endpoint=endpoint, token=token)
        self._image, self._given_namespace = image, namespace
        self._ended: dict[str, ReplicaResult] = {}

    def launch_replicas(self, specs: Sequence[ReplicaSpec]) -> tuple[ReplicaHandle, ...]:
        """Start all, or none. They share a label, ``hintloop-launch``."""
        secrets = [secret_values(spec.secrets) for spec in specs]
        self._namespace()  # what is wrong with the token shows before anything is started
        launch = uuid.uuid4().hex
        return all_or_none(
            lambda: tuple(
                ReplicaHandle(self._start(spec, values, launch), spec.index)
                for spec, values in zip(specs, secrets, strict=True)
            ),
            lambda: self._cancel_launch(launch),
        )

    def poll(self, handle: ReplicaHandle) -> ReplicaState:
        """Where the job is now."""
        return self._look(handle).state

    def stream_logs(self, handle: ReplicaHandle, *, timeout_s: float) -> Iterator[str]:
        """The lines that it writes, from its first; ends with it, or after ``timeout_s``."""
        namespace = self._namespace()

        def read() -> Iterable[str]:
            with _translated():
                yield from self._api.fetch_job_logs(job_id=handle.id, namespace=namespace, follow=True)

        return (line[:LINE_CHARS] for line in follow(read, timeout_s=timeout_s))

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """Ask the service to end those that are not over; it does so by itself."""
        cancel_each(handles, self.poll, self._cancel)

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout_s: float) -> tuple[ReplicaResult, ...]:
        """Wait until all are over, ``timeout_s`` at most; the results in the same order."""
        return collected(self._look, handles, timeout_s=timeout_s, poll_s=self.poll_s)

    def _start(self, spec: ReplicaSpec, secrets: dict[str, str], launch: str) -> str:
        from huggingface_hub import Volume

        volumes = [
            Volume(type="bucket", source=source, mount_path=path) for path, source in spec.volumes.items()
        ]
        namespace = self._namespace()
        job = self._call(
            lambda: self._api.run_job(
                image=self._image,
                command=list(spec.command),
                env=dict(spec.env),
                secrets=secrets,
                flavor=spec.hardware,
                timeout=max(1, round(spec.timeout_s)),
                name=f"hintloop-replica-{spec.index}",
                labels={LABEL: launch},
                volumes=volumes,
                namespace=namespace,
            )
        )
        return str(job.id)

    def _look(self, handle: ReplicaHandle) -> ReplicaResult:
        if handle.id in self._ended:
            return self._ended[handle.id]
        namespace = self._namespace()
        status = self._call(lambda: self._api.inspect_job(job_id=handle.id, namespace=namespace)).status
        state = STATES.get(status.stage, ReplicaState.RUNNING)
        if not state.over:
            return ReplicaResult(handle.index, state)
        code = _exit_code(state, status.message)
        error = self._why(handle, code, status.message) if state is ReplicaState.FAILED else None
        self._ended[handle.id] = ReplicaResult(handle.index, state, code, error)
        return self._ended[handle.id]

    def _why(self, handle: ReplicaHandle, code: int | None, message: str | None) -> str:
        namespace = self._namespace()
        try:
            tail = self._call(
                lambda: list(self._api.fetch_job_logs(job_id=handle.id, namespace=namespace, tail=_TAIL))
            )
        except ExecutorError as error:
            return f"{message or 'failed'} (its log cannot be read: {error})"
        said = next((line for line in reversed(tail) if line.strip()), "")
        return explain(code, (code is None and message) or said)

    def _cancel(self, handle: ReplicaHandle) -> None:
        namespace = self._namespace()
        self._call(lambda: self._api.cancel_job(job_id=handle.id, namespace=namespace))

    def _cancel_launch(self, launch: str) -> None:
        """End also those whose start was not answered. One that cannot be found ends after its ``timeout_s``."""
        namespace = self._namespace()
        jobs = self._call(lambda: list(self._api.list_jobs(labels={LABEL: launch}, namespace=namespace)))
        self.cancel([ReplicaHandle(job.id, number) for number, job in enumerate(jobs)])

    def _namespace(self) -> str:
        if self._given_namespace is None:
            self._given_namespace = str(self._call(self._api.whoami)["name"])
        return self._given_namespace

    def _call(self, call: Callable[[], T]) -> T:
        with _translated():
            return within(CALL_S, call)


@contextmanager
def _translated() -> Iterator[None]:
    """What the client raises, as this package's own errors."""
    # HTTPError is of the HTTP library, which is another one in another release
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    try:
        yield
    except HfHubHTTPError as error:
        code = error.response.status_code
        kind = Unreachable if code == 429 or code >= 500 else ExecutorError
        raise kind(one_line(error)) from error
    except (HTTPError, OSError) as error:
        raise Unreachable(one_line(error)) from error


def _exit_code(state: ReplicaState, message: str | None) -> int | None:
    """The service has no field for it, but says it in words when a job failed."""
    found = _EXIT_CODE.search(message or "")
    return 0 if state is ReplicaState.SUCCEEDED else int(found[1]) if found else None
