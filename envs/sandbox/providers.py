"""Sandbox providers by name."""

from __future__ import annotations

from collections.abc import Callable

from hintloop.envs.sandbox.base import SandboxDead, SandboxProvider

GVISOR = "runsc"
"""Name under which engines know gVisor's runtime."""


def _local(pool: int) -> SandboxProvider:
    from hintloop.envs.sandbox.local import LocalProvider

    return LocalProvider()


def _docker(pool: int, runtime: str | None = None) -> SandboxProvider:
    try:
        from hintloop.envs.sandbox.docker import DockerProvider
    except ModuleNotFoundError as error:
        raise SandboxDead(f"{error.name} is not installed; pip install 'hintloop[docker]'") from None
    return DockerProvider(runtime=runtime, pool=pool)


PROVIDERS: dict[str, Callable[[int], SandboxProvider]] = {
    "local": _local,
    "docker": _docker,
    "docker+gvisor": lambda pool: _docker(pool, GVISOR),
}
"""Name -> how to open one that keeps so many sandboxes ready, if starting one takes long."""


def open_provider(name: str, *, pool: int = 4) -> SandboxProvider:
    """A provider of the named kind. ``ValueError`` for another name; ``SandboxDead`` when it cannot work here."""
    if name not in PROVIDERS:
        raise ValueError(f"no sandbox {name!r}; known: {', '.join(PROVIDERS)}")
    return PROVIDERS[name](pool)
