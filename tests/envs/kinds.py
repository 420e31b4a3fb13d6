"""The kinds of sandboxes, as parameters of a test, and how a test opens one."""

from __future__ import annotations

import pytest

from hintloop.envs.sandbox.base import SandboxDead, SandboxProvider
from hintloop.envs.sandbox.providers import open_provider

KINDS = [
    "local",
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("docker+gvisor", marks=pytest.mark.docker),
]


def open_or_skip(kind: str, pool: int = 2) -> SandboxProvider:
    """A provider; skips the test where this host cannot have it, or only with less isolation."""
    try:
        provider = open_provider(kind, pool=pool)
    except SandboxDead as error:
        pytest.skip(str(error))
    if kind == "local" and not {"user", "pid", "mount", "net"} <= set(provider.isolation.split("+")):
        provider.close()
        pytest.skip(f"this host only allows the isolation {provider.isolation}")
    return provider
