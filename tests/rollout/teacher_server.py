"""A teacher on loopback whose answers, and whose bad manners, are a script."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hintloop.envs.models import ToolCall
from hintloop.rollout.expert_server import completion


@dataclass(frozen=True)
class Reply:
    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


HANG = Reply(b"", 0)
"""Never answer."""
HANG_UP = Reply(b"", -1)
"""Take the question and close the connection."""
Answer = Callable[[int, dict[str, Any]], Reply]
"""Number of the request (from 0) and its body -> the reply."""


@dataclass
class TeacherServer:
    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


def says(call: ToolCall | None, usage: dict[str, Any] | None = None) -> Reply:
    """A chat completion that makes ``call``."""
    body = completion([], call)
    return Reply(json.dumps({**body, "usage": usage} if usage is not None else body).encode())


def says_all(*calls: ToolCall, usage: dict[str, Any] | None = None) -> Reply:
    """A chat completion that makes several calls in one turn."""
    made = [completion([], call) for call in calls]
    tool_calls = [each["choices"][0]["message"]["tool_calls"][0] for each in made]
    made[0]["choices"][0]["message"]["tool_calls"] = tool_calls
    return Reply(json.dumps(made[0] if usage is None else {**made[0], "usage": usage}).encode())


@contextlib.contextmanager
def teaching(answer: Answer) -> Iterator[TeacherServer]:
    """Serve on a free port."""
    over, lock = threading.Event(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                number = len(server.requests)
                server.requests.append(body)
                server.headers.append({name.lower(): value for name, value in self.headers.items()})
            reply = answer(number, body)
            if reply is HANG:
                over.wait(60)
            if reply.status <= 0:
                self.close_connection = True
                return
            with contextlib.suppress(OSError):  # the client has given up
                self.send_response(reply.status)
                for name, value in {**reply.headers, "content-length": str(len(reply.body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply.body)

        def log_message(self, *_: Any) -> None:
            """Nothing is printed."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = TeacherServer(f"http://127.0.0.1:{http.server_port}/v1")
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        over.set()
        http.shutdown()
        thread.join(10)
        http.server_close()
