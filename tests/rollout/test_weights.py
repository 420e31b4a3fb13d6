"""Following the weights: the newest one, checked against what the learner says of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hintloop.replay.weights import WeightStore
from hintloop.rollout.weights import (
    Fetched,
    NoWeights,
    WeightsRefused,
    check_probe,
    first_version,
    next_version,
)


def publish(store: WeightStore, folder: Path, version: int, **metadata: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "weights.txt").write_text(str(version))
    store.publish(version, folder, metadata=metadata)


def test_it_waits_for_the_first_version_and_then_takes_the_newest(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "weights")

    async def run() -> list[Fetched]:
        waiting = asyncio.create_task(first_version(store, tmp_path / "cache", poll_s=0.01, timeout_s=5))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        publish(store, tmp_path / "made", 0)
        first = await waiting
        publish(store, tmp_path / "made", 1)
        publish(store, tmp_path / "made", 2, final=True)
        return [first, await next_version(store, tmp_path / "cache", after=0, poll_s=0.01, fetch_s=5)]

    first, second = asyncio.run(run())
    assert (first.version, first.final) == (0, False)
    assert (second.version, second.final) == (2, True)
    assert (second.folder / "weights.txt").read_text() == "2"


def test_missing_weights_are_reported_after_the_deadline(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "weights")
    with pytest.raises(NoWeights, match="is the learner running"):
        asyncio.run(first_version(store, tmp_path / "cache", poll_s=0.01, timeout_s=0.05))


def test_a_version_that_goes_away_while_it_is_fetched_is_passed_over(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "weights")

    class Vanishing:
        """The newest version is pruned between the two calls, once."""

        def __init__(self) -> None:
            self.gone = False

        def latest(self) -> Any:
            return store.latest()

        def fetch(self, version: int, cache: Path) -> Path:
            if not self.gone:
                self.gone = True
                raise FileNotFoundError(version)
            return store.fetch(version, cache)

    publish(store, tmp_path / "made", 4)
    found = asyncio.run(next_version(Vanishing(), tmp_path / "cache", after=0, poll_s=0.01, fetch_s=5))
    assert found.version == 4


def probe(version: int, logprobs: list[float]) -> Fetched:
    return Fetched(version, Path(), False, {"probe": {"token_ids": [1.0, 2.0, 3.0], "logprobs": logprobs}})


@pytest.mark.parametrize(
    ("published", "refused"),
    [
        ([-1.0, -2.0], False),
        ([-1.0, -2.0005], False),
        ([-1.0, -2.002], True),
        ([-1.0], True),
        ([-1.0, float("nan")], True),
    ],
)
def test_an_engine_that_computes_something_else_is_refused(published: list[float], refused: bool) -> None:
    async def score(ids: Sequence[int]) -> list[float]:
        assert list(ids) == [1, 2, 3]
        return [-1.0, -2.0]

    if refused:
        with pytest.raises(WeightsRefused, match="version 7"):
            asyncio.run(check_probe(probe(7, published), score))
    else:
        worst = asyncio.run(check_probe(probe(7, published), score))
        assert worst is not None
        assert worst < 1e-3


def test_without_a_probe_or_a_way_to_score_there_is_nothing_to_compare(tmp_path: Path) -> None:
    async def score(ids: Sequence[int]) -> list[float]:
        raise AssertionError("not to be called")

    assert asyncio.run(check_probe(Fetched(1, tmp_path, False, {}), score)) is None
    assert asyncio.run(check_probe(probe(1, [0.0, 0.0]), None)) is None


class Flaky:
    """A storage of weights whose first looks and fetches fail."""

    def __init__(self, store: WeightStore, failures: Sequence[Exception]) -> None:
        self.store = store
        self.failures = list(failures)

    def latest(self) -> Any:
        if len(self.failures) > 1:
            raise self.failures.pop(0)
        return self.store.latest()

    def fetch(self, version: int, cache: Path) -> Path:
        if self.failures:
            raise self.failures.pop(0)
        return self.store.fetch(version, cache)


def test_a_storage_that_fails_for_a_while_is_looked_at_again_and_each_failure_is_heard_of(
    tmp_path: Path,
) -> None:
    store = WeightStore(tmp_path / "weights")
    publish(store, tmp_path / "made", 0)
    heard: list[OSError] = []
    looks: list[None] = []
    errors = [OSError("no answer"), PermissionError("for now"), OSError("cut off")]

    async def run() -> Fetched:
        return await next_version(
            Flaky(store, errors),
            tmp_path / "cache",
            after=-1,
            poll_s=0.01,
            fetch_s=5,
            on_look=lambda: looks.append(None),
            on_failure=heard.append,
        )

    assert asyncio.run(run()).version == 0
    assert heard == errors
    assert len(looks) == 4
