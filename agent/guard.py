"""``python guard.py COMMAND...`` runs a command whose whole process group dies with it, and with who started it.

Standard input is a socket to the starter. The exit status of the command is written to it; when the other end is
closed, however that came about, everything in the group is killed. Run as a file, this imports nothing of ours.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> None:
    """Run the command, report how it ended, end with it."""
    channel = os.dup(0)
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_die_with_the_other_end, args=(channel,), daemon=True).start()
    status = command.wait()
    os.write(channel, str(status if status >= 0 else 128 - status).encode())
    os.killpg(0, signal.SIGKILL)


def _die_with_the_other_end(channel: int) -> None:
    while os.read(channel, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
