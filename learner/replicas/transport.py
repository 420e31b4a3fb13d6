"""How a replica that comes back gets the state of a live one: safetensors over HTTP, on one address.

torchft's own transport listens on all addresses and loads pickle, so whoever can connect could run code in a
replica. This one runs nothing that it receives; who may connect is still a matter of the address it listens on.
"""

from __future__ import annotations

import threading
import urllib.request
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torchft.checkpointing.transport import CheckpointTransport

from hintloop.learner.replicas.state import from_bytes, to_bytes


class SafetensorsTransport(CheckpointTransport[Any]):  # type: ignore[misc]
    """Serves one state at a time, from when it is staged until ``disallow_checkpoint``."""

    def __init__(self, host: str, *, timeout_s: float = 60.0) -> None:
        """``host``: the address to listen on, and the one that the others connect to.

        ``timeout_s``: how long a state may be asked for before it is staged.
        """
        self._timeout_s = timeout_s
        self._staged: tuple[int, bytes] | None = None
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer((host, 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def metadata(self) -> str:
        """Address of the states."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/"

    def staged(self, step: int) -> bytes | None:
        """The encoded state of a step; None when it is not there in time. Whoever needs it may ask too early."""
        with self._changed:
            self._changed.wait_for(lambda: self._has(step), self._timeout_s)
            return self._staged[1] if self._staged and self._has(step) else None

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Stage a copy for whoever asks."""
        staged = step, to_bytes(state_dict)
        with self._changed:
            self._staged = staged
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Forget what is staged: whoever needed it has taken part in an average since, so it has it."""
        with self._changed:
            self._staged = None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """The state of a step. ``OSError`` when it cannot be had, ``ValueError`` when it is no state."""
        with urllib.request.urlopen(f"{metadata}{step}", timeout=timeout.total_seconds()) as answer:
            return from_bytes(answer.read())

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        if wait:
            self._thread.join()

    def _has(self, step: int) -> bool:
        return self._staged is not None and self._staged[0] == step


def _handler(transport: SafetensorsTransport) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 60.0

        def do_GET(self) -> None:
            step = self.path.removeprefix("/")
            data = transport.staged(int(step)) if step.isdecimal() else None
            self.send_response(200 if data is not None else 404)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, *_: object) -> None:
            """Nothing to say."""

    return Handler
