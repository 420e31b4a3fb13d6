"""Where things are inside of a sandbox, whatever kind it is."""

from __future__ import annotations

WORKSPACE = "/workspace"
"""The working directory, unless an image has one of its own."""
WORKSPACE_NAMES = ("/app", "/testbed", "/repo")
"""Other common names of a working directory; they lead to it where the image has none of that name."""
VERIFIER = ("/tests", "/logs", "/solution")
"""Writable folders for who grades: its tests, their report, and what the reference solution needs."""
PROGRAMS = "/opt/hintloop/bin"
PACKAGES = "/opt/hintloop/packages"
"""Python packages that every program finds, if the sandbox's own Python lacks them: pytest and what it needs."""
PRISTINE = "/opt/hintloop/workspace"
"""Where an image keeps the content of its working directory, which is empty at first."""
