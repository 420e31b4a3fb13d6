"""What a part needs besides when it is a service of its own: progress in its log, and servers found by name."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from rich.console import Console

from hintloop.cli.config import Config
from hintloop.cli.display import Display
from hintloop.cli.runfolder import RunFolder, write_text

LOOK_S = 5.0
TICK_S = 1.0


@contextlib.contextmanager
def progress(folder: RunFolder, settings: Config) -> Iterator[None]:
    """A line about the run now and then, on standard error, while this is open."""
    console = Console(file=sys.stderr, force_terminal=False, width=400)
    with Display(folder, settings, console) as display, _repeated(display.refresh, TICK_S):
        yield


@contextlib.contextmanager
def servers_by_name(url: str, roster: Path) -> Iterator[None]:
    """Keep in ``roster`` one URL, a line each, for every address that the name in ``url`` has; while this is open.

    A name without an address, such as that of servers which are starting, changes nothing.
    """
    log = structlog.get_logger(__name__)

    def look() -> None:
        found = addresses(url)
        if found and found != (roster.read_text().splitlines() if roster.exists() else []):
            write_text(roster, "".join(f"{each}\n" for each in found))
            log.info("engines", urls=found)

    roster.unlink(missing_ok=True)  # addresses of an earlier time may be those of others now
    look()
    with _repeated(look, LOOK_S):
        yield


def spread(urls: Sequence[str]) -> list[str]:
    """The URLs, and before each whose name stands for several servers these servers' own.

    The name stays: after a restart the servers may have other addresses.
    """
    made = []
    for url in urls:
        found = addresses(url)
        made += [*(found if len(found) > 1 else ()), url]
    return made


def addresses(url: str) -> list[str]:
    """The URL once for each address of its host; empty when it has none now. ``ValueError`` for a bad port."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme in ("https", "wss") else 80)
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    hosts = sorted({str(address[0]) for *_, address in found})
    return [f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host in hosts]


@contextlib.contextmanager
def _repeated(work: Callable[[], None], seconds: float) -> Iterator[None]:
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            try:
                work()
            except (OSError, ValueError) as error:
                structlog.get_logger(__name__).warning("not_done", error=repr(error))

    thread = threading.Thread(target=run, name="beside-the-part", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(seconds + 1)
