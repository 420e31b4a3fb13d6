"""Bringing the engine to the newest weights, while it goes on sampling.

A version counts as loaded only after the engine has reproduced the log-probabilities that the learner
published with it; an engine that computes something else than the learner is not sampled from for long.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import structlog

from hintloop.replay.weights import MANIFEST, DigestMismatch, version_name
from hintloop.rollout.offload import aside

PROBE_TOLERANCE = 1e-3
"""Largest difference of a log-probability, nats."""
KEPT_VERSIONS = 2
"""Fetched versions that stay in the cache."""
LOOK_S = 60.0
"""What a look for the newest version may take."""

OnFailure = Callable[[OSError], None]
Score = Callable[[Sequence[int]], Awaitable[list[float]]]
"""Token ids -> log-probability of each one after the first, given those before it, at temperature 1."""


class Manifest(Protocol):
    """What a published version says of itself; ``hintloop.replay.weights.Manifest`` is one."""

    @property
    def version(self) -> int: ...
    @property
    def metadata(self) -> dict[str, Any]: ...
    def to_json(self) -> bytes: ...


class Store(Protocol):
    """Where versions come from; ``hintloop.replay.weights.WeightStore`` is one."""

    def latest(self) -> Manifest | None: ...
    def fetch(self, version: int, cache: Path, /) -> Path: ...


class Loads(Protocol):
    """The part of an engine that takes weights."""

    async def load_weights(self, folder: Path, version: int) -> None: ...


class WeightsRefused(Exception):
    """The engine does not compute what the learner says these weights give."""


class NoWeights(Exception):
    """Nobody has published weights in time."""


_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A version that lies in the cache."""

    version: int
    folder: Path
    final: bool
    """The learner has said that no other version follows."""
    metadata: dict[str, Any]


def _ignore(error: OSError) -> None:
    """Nobody counts it."""


async def first_version(
    store: Store, cache: Path, *, poll_s: float, timeout_s: float, on_failure: OnFailure = _ignore
) -> Fetched:
    """The newest version, waiting for the first one; ``on_failure`` hears when the storage fails.

    Raises ``NoWeights``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        newest = await _newest(store, cache, after=-1, fetch_s=timeout_s, on_failure=on_failure)
        if newest is not None:
            return newest
        if time.monotonic() >= deadline:
            raise NoWeights(f"no weights came within {timeout_s:g} s; is the learner running?")
        await asyncio.sleep(poll_s)


async def next_version(
    store: Store,
    cache: Path,
    *,
    after: int,
    poll_s: float,
    fetch_s: float,
    whole: bool = True,
    on_look: Callable[[], None] = lambda: None,
    on_failure: OnFailure = _ignore,
) -> Fetched:
    """The newest version once there is one after ``after``. Waits without end: pacing has the deadline.

    A fetch that takes more than ``fetch_s`` is begun anew. Unless ``whole``, the version's folder holds the manifest
    only: for an engine whose servers fetch by themselves.
    ``on_look`` is called before each look at the storage, ``on_failure`` when one fails.
    """
    while True:
        on_look()
        newest = await _newest(store, cache, after=after, fetch_s=fetch_s, whole=whole, on_failure=on_failure)
        if newest is not None:
            return newest
        await asyncio.sleep(poll_s)


async def check_probe(
    fetched: Fetched, score: Score | None, tolerance: float = PROBE_TOLERANCE
) -> float | None:
    """Compare the engine with the version's probe; the largest difference, or None without a comparison.

    The probe is ``{"token_ids": [...], "logprobs": [...]}``, with one log-probability for each token after
    the first. Raises ``WeightsRefused``.
    """
    probe = fetched.metadata.get("probe")
    if probe is None or score is None:
        return None
    ours = await score([int(token) for token in probe["token_ids"]])
    theirs = probe["logprobs"]
    if len(ours) != len(theirs):
        raise WeightsRefused(
            f"version {fetched.version}: its probe has {len(theirs)} values for {len(ours)} tokens"
        )
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    worst = math.nan if any(map(math.isnan, differences)) else max(differences, default=0.0)
    if not worst <= tolerance:
        raise WeightsRefused(
            f"version {fetched.version}: the engine's log-probabilities differ from the learner's "
            f"by {worst:.2g} nats"
        )
    return worst


def drop_old(cache: Path, version: int) -> None:
    """Delete what was fetched before ``version``, all but ``KEPT_VERSIONS`` in all."""
    names = sorted((path for path in cache.glob("v*") if path.name <= version_name(version)), reverse=True)
    for path in names[KEPT_VERSIONS:]:
        shutil.rmtree(path, ignore_errors=True)


async def _newest(
    store: Store, cache: Path, *, after: int, fetch_s: float, whole: bool = True, on_failure: OnFailure
) -> Fetched | None:
    try:
        manifest = await aside(store.latest, name="weights", limit_s=LOOK_S)
        if manifest is None or manifest.version <= after:
            return None
        fetch = partial(store.fetch, manifest.version) if whole else partial(_put_manifest, manifest)
        folder = await aside(partial(fetch, cache), name="weights", limit_s=fetch_s)
    except (OSError, DigestMismatch) as error:
        # Pruned meanwhile, or a storage that fails for now: whoever waits has a deadline of his own.
        _log.warning("weights_not_fetched", error=repr(error))
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            on_failure(error)
        return None
    final = bool(manifest.metadata.get("final"))
    return Fetched(manifest.version, folder, final, manifest.metadata)


def _put_manifest(manifest: Manifest, cache: Path) -> Path:
    """The version's folder in the cache, with nothing but its manifest unless it is there already."""
    folder = cache / version_name(manifest.version)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{MANIFEST}.{os.getpid()}"
    part.write_bytes(manifest.to_json())
    part.replace(folder / MANIFEST)
    return folder
