"""Sandboxes of every kind, and the attacked tasks as the environment knows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from hintloop.envs.registry import register_task
from hintloop.envs.sandbox.base import SandboxProvider

from ..kinds import KINDS, open_or_skip
from .tasks import ASSERTIONS, ENDED_LOOPS, FUNCTION, REPOSITORY


@pytest.fixture(scope="session", autouse=True)
def _registered() -> None:
    for task in (FUNCTION, ASSERTIONS, REPOSITORY, ENDED_LOOPS):
        register_task(task)


@pytest.fixture(scope="module", params=KINDS)
def provider(request: pytest.FixtureRequest) -> Iterator[SandboxProvider]:
    made = open_or_skip(cast(str, request.param), pool=3)
    yield made
    made.close()
