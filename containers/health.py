"""``python -m hintloop.containers.health WHAT``: exit status 0 when a service is well, 1 when it is not.

WHAT is a URL that must answer with 200; the path of a socket on which the Docker engine's API must answer; or a status
file, which a part of the run writes again and again while it is well.
"""

from __future__ import annotations

import socket
import stat
import sys
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

TIMEOUT_S = 5.0
SILENT_S = 300.0
"""Age of a status file that is still well: a step of a large model takes its time."""


def problem(what: str) -> str | None:
    """What is wrong, or None. Raises ``OSError``."""
    if what.startswith("http://"):
        parts = urlsplit(what)
        with closing(HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)) as connection:
            connection.request("GET", parts.path or "/")
            return _of_status(connection.getresponse().status)
    status = Path(what).stat()
    if stat.S_ISSOCK(status.st_mode):
        return _of_status(_ping(what))
    silent = time.time() - status.st_mtime
    return None if silent < SILENT_S else f"silent for {silent:.0f} s"


def _of_status(status: int) -> str | None:
    return None if status == 200 else f"HTTP {status}"


def _ping(path: str) -> int:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(TIMEOUT_S)
        sock.connect(path)
        sock.sendall(b"GET /_ping HTTP/1.1\r\nHost: docker\r\n\r\n")
        words = sock.recv(64).split(b" ", 2)
    return int(words[1]) if len(words) == 3 and words[1].isdigit() else 0


def main() -> None:
    """Look once."""
    try:
        found = problem(sys.argv[1])
    except OSError as error:
        found = str(error)
    if found:
        sys.exit(found)


if __name__ == "__main__":
    main()
