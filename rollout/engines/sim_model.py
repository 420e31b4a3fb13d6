"""The model of the simulated server: token ids and log-probabilities made of hashes, and yet of the weights.

What a token is drawn as depends on the context, the seed and the loaded version; its log-probability on the
context and the version alone. So from a recorded sample anybody can tell which version drew each token. The
version's own probe is reproduced, as a real engine with these weights would.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from hintloop.replay.weights import MANIFEST, Manifest

DEFAULT_VOCABULARY = 1000
_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15


def fold(context: int, token: int) -> int:
    """The context after one more token."""
    return (context * 0xD6E8FEB86659FD93 + token + 1) & _MASK


def context_of(token_ids: Sequence[int]) -> int:
    """The context after a prompt."""
    context = _START
    for token in token_ids:
        context = fold(context, token)
    return context


@dataclass(frozen=True, slots=True)
class SimModel:
    """One version of the weights."""

    key: int = 0
    """Stands for the weights: made of the version and the digests of its files."""
    vocabulary: int = DEFAULT_VOCABULARY
    probe_ids: tuple[int, ...] = ()
    probe_logprobs: tuple[float, ...] = ()

    @classmethod
    def of(cls, folder: Path, *, vocabulary: int = DEFAULT_VOCABULARY) -> SimModel:
        """The model in a fetched version. ``ValueError`` or ``OSError`` when it cannot be read.

        ``vocabulary`` is for a version that does not say how many token ids there are.
        """
        manifest = Manifest.from_json((folder / MANIFEST).read_bytes())
        digests = "".join(entry.sha256 for _, entry in sorted(manifest.files.items()))
        probe = manifest.metadata.get("probe") or {"token_ids": [], "logprobs": []}
        return cls(
            key=hash_of(f"{manifest.version}:{digests}"),
            vocabulary=_vocabulary(folder, vocabulary),
            probe_ids=tuple(int(token) for token in probe["token_ids"]),
            probe_logprobs=tuple(probe["logprobs"]),
        )

    def logprob(self, context: int, token: int) -> float:
        """Of a token in a context, nats; between -5 and 0."""
        share = _mix(context ^ self.key ^ (token * 0x8CB92BA72F3D8DD7 & _MASK)) / _MASK
        return -0.001 - 4.9 * share

    def draw(self, context: int, seed: int, stop_ids: Collection[int], stop_after: int) -> int:
        """The next token; one of ``stop_ids`` about once in ``stop_after`` tokens."""
        chance = _mix(context ^ self.key ^ seed)
        if stop_ids and chance % stop_after == 0:
            return min(stop_ids)
        return (chance >> 20) % self.vocabulary

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token after the first."""
        if tuple(token_ids) == self.probe_ids[: len(token_ids)]:
            return list(self.probe_logprobs[: len(token_ids) - 1])
        scores, context = [], fold(_START, token_ids[0])
        for token in token_ids[1:]:
            scores.append(self.logprob(context, token))
            context = fold(context, token)
        return scores


def hash_of(text: str) -> int:
    """64 bits of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _vocabulary(folder: Path, default: int) -> int:
    path = folder / "config.json"
    if not path.is_file():
        return default
    size = json.loads(path.read_text()).get("vocab_size", default)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"config.json has no usable vocab_size: {size!r}")
    return size


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
