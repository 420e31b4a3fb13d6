"""A Hub on loopback with the jobs API, for the real ``huggingface_hub`` to talk to; jobs go as they are told."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

USER = "somebody"
TOKEN = "hf_of_the_test"
_JOB = re.compile(rf"/api/jobs/{USER}/([0-9a-f]+)(?:/(logs|cancel))?")


@dataclass
class Job:
    """What the server knows of a job. Each time that it is asked for, the next of ``stages`` is reached."""

    spec: dict[str, Any]
    stages: list[tuple[str, str | None]]
    logs: list[str] = field(default_factory=list)
    hold: threading.Event | None = None
    """The stream of its log stays open, after the last line, until this is set."""
    start: int = 200
    """Status of the answer to its start; another one than 200: it does not start; 0: it does, without an answer."""
    cancelled: int = 0

    def stage(self) -> tuple[str, str | None]:
        return self.stages.pop(0) if len(self.stages) > 1 else self.stages[0]


@dataclass
class FakeHub:
    """The state of the server."""

    url: str = ""
    scripts: list[Job] = field(default_factory=list)
    """What jobs that are started do, in turn; their specs are put in."""
    jobs: dict[str, Job] = field(default_factory=dict)
    failures: list[tuple[str, int]] = field(default_factory=list)
    """(method and path, as a pattern; status): the next such request fails."""
    requests: list[str] = field(default_factory=list)

    def plan(self, *stages: str | tuple[str, str], logs: tuple[str, ...] = (), start: int = 200) -> Job:
        """The next job that is started reaches these stages, some with a message."""
        pairs: list[tuple[str, str | None]] = [
            (each, None) if isinstance(each, str) else each for each in stages
        ]
        self.scripts.append(Job({}, pairs, list(logs), start=start))
        return self.scripts[-1]

    def info(self, name: str) -> dict[str, Any]:
        """A job as the API gives it."""
        job = self.jobs[name]
        stage, message = job.stage()
        return {
            "id": name,
            "createdAt": "2026-01-01T12:00:00.000Z",
            "startedAt": None if stage == "SCHEDULING" else "2026-01-01T12:00:05.000Z",
            "finishedAt": None,
            "dockerImage": job.spec.get("dockerImage"),
            "command": job.spec["command"],
            "arguments": job.spec["arguments"],
            "environment": job.spec["environment"],
            "flavor": job.spec["flavor"],
            "labels": job.spec.get("labels"),
            "volumes": job.spec.get("volumes"),
            "status": {"stage": stage, "message": message},
            "owner": {"id": "1", "name": USER, "type": "user"},
            "initiator": {"type": "user", "id": "1", "name": USER},
        }

    def fails(self, request: str) -> int | None:
        """The status that a request has to fail with."""
        for position, (pattern, status) in enumerate(self.failures):
            if re.fullmatch(pattern, request):
                del self.failures[position]
                return status
        return None


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _serve(self) -> None:
        address, hub = urlsplit(self.path), self.hub
        request = f"{self.command} {address.path}"
        hub.requests.append(request)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        failure = hub.fails(request)
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "Invalid username or password."}, 401)
        elif failure:
            self._answer({"error": f"told to fail with {failure}"}, failure)
        elif request == "GET /api/whoami-v2":
            self._answer({"type": "user", "name": USER})
        elif request == f"POST /api/jobs/{USER}":
            self._start(json.loads(body))
        elif request == f"GET /api/jobs/{USER}":
            wanted = [label.split("=") for label in parse_qs(address.query).get("label", [])]
            labels = {name: job.spec.get("labels", {}) for name, job in hub.jobs.items()}
            found = [name for name, has in labels.items() if all(has.get(k) == v for k, v in wanted)]
            self._answer([hub.info(name) for name in found])
        elif (match := _JOB.fullmatch(address.path)) and match[1] in hub.jobs:
            self._job(match[1], match[2])
        else:
            self._answer({"error": "Job not found"}, 404)

    def _start(self, spec: dict[str, Any]) -> None:
        job, name = self.hub.scripts.pop(0), f"{len(self.hub.jobs):024x}"
        if job.start not in (0, 200):
            self._answer({"error": f"told to fail with {job.start}"}, job.start)
            return
        job.spec = spec
        self.hub.jobs[name] = job
        if job.start:
            self._answer(self.hub.info(name))
        else:
            self.close_connection = True

    def _job(self, name: str, what: str | None) -> None:
        job = self.hub.jobs[name]
        if what == "logs":
            self._logs(job)
        elif what == "cancel":
            job.cancelled += 1
            job.stages = [("CANCELED", None)]
            self._answer({})
        else:
            self._answer(self.hub.info(name))

    def _logs(self, job: Job) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for line in ["===== Job started at 2026-01-01 12:00:05 =====", *job.logs]:
            event = {"timestamp": "2026-01-01T12:00:06.000Z", "data": line}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
        if job.hold:
            job.hold.wait(30)
        self.close_connection = True

    def _answer(self, data: Any, status: int = 200) -> None:
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def serve() -> Iterator[FakeHub]:
    """A server with nothing in it."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        for job in hub.jobs.values():
            if job.hold:
                job.hold.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
