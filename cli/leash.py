"""``python leash.py PARENT_PID COMMAND...`` runs the command so that it is killed when its parent ends.

The kernel does it (Linux), so it works however the parent ends, SIGKILL included. Run as a file, this imports
nothing of ours and costs a few milliseconds; the command then takes over the process. Elsewhere than on Linux
the command runs without.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set the death signal, which survives ``exec``, and become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the signal was set
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
