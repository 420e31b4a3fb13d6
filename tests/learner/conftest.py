"""What all of the learner's tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_search_through_the_libraries() -> Iterator[None]:
    """Each start of a trainer collects garbage; searching the libraries' objects would take a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
