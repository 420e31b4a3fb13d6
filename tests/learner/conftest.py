"""What all of the learner's tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def no_search_through_the_libraries() -> Iterator[None]:
    """Each start of a trainer collects garbage; searching the libraries' objects would take a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the processes have it that a result is compared with: sums in another order differ, and Adam magnifies it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
