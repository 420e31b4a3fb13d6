"""Where replicas find each other: torchft's lighthouse, on one address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hintloop.learner.replicas.diloco import MISSING

TICK_MS = 50


@contextmanager
def open_lighthouse(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    min_replicas: int = 1,
    join_timeout_s: float = 60.0,
    heartbeat_timeout_s: float = 5.0,
) -> Iterator[str]:
    """Serve on ``host``, to anybody who can connect, and give the URL; ``port`` 0 takes a free one.

    A quorum has ``min_replicas`` at least. It waits ``join_timeout_s`` for replicas that are alive and still train;
    one is dead when nothing was heard of it for ``heartbeat_timeout_s``. ``ValueError`` without torchft.
    """
    try:
        from torchft.coordination import LighthouseServer
    except ImportError as error:
        raise ValueError(MISSING) from error
    server = LighthouseServer(
        bind=f"{host}:{port}",
        min_replicas=min_replicas,
        join_timeout_ms=int(1000 * join_timeout_s),
        quorum_tick_ms=TICK_MS,
        heartbeat_timeout_ms=int(1000 * heartbeat_timeout_s),
    )
    try:
        # The address that it tells is the machine's name, whatever it listens on.
        yield f"http://{host}:{server.address().rstrip('/').rpartition(':')[2]}"
    finally:
        server.shutdown()
