"""``python guard.py SECONDS COMMAND...`` runs a command whose whole process group ends with it, or after SECONDS.

It also ends with who started it, however that came about: standard input is a socket to the starter, and when the
other end is closed everything in the group is killed. How the command ended is written to that socket. SIGTERM is
for the command, not for this. Run as a file, this imports nothing of ours.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

TIMEOUT = "timeout"
NOT_STARTED = 127


def main() -> None:
    """Run the command, report how it ended (its exit code as a shell gives it, or ``timeout``), end with it."""
    seconds, command = float(sys.argv[1]), sys.argv[2:]
    channel = os.dup(0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(
            number, lambda *_: None
        )  # unlike one that is ignored, it is the default again in the command
    threading.Thread(target=_die_with_the_other_end, args=(channel,), daemon=True).start()
    os.write(channel, _run(command, seconds).encode())
    os.killpg(0, signal.SIGKILL)


def _run(command: list[str], seconds: float) -> str:
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return str(NOT_STARTED)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return TIMEOUT
    return str(code if code >= 0 else 128 - code)


def _die_with_the_other_end(channel: int) -> None:
    while os.read(channel, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
