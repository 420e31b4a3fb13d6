"""An average over replicas that share nothing but an object store.

A round is a folder ``round-00000012`` with one immutable object per rank, ``rank-3-of-4.safetensors``: there whole
or not at all. Every rank reads all of them and adds up in the order of ranks, so all get the same bits. A rank
that is started again finds what it had written and neither writes it again nor changes it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from hintloop.learner.replicas.state import from_bytes, to_bytes
from hintloop.replay.storage import Store

_ROUND = re.compile(r"round-(\d{8,})")
_RANK = re.compile(r"rank-(\d+)-of-(\d+)\.safetensors")


class MissingRanks(TimeoutError):
    """A round was not complete in time; ``ranks`` are those that gave nothing."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class Stopped(Exception):
    """This rank was told to stop while others were missing. What it gave stays, as if it had died."""


class ObjectStoreAllReduce:
    """Averages tensors of ``world_size`` ranks through a folder at any fsspec URI, round by round."""

    def __init__(
        self,
        uri: str | Path,
        rank: int,
        world_size: int,
        *,
        timeout_s: float = 3600.0,
        poll_s: float = 0.5,
        keep: int = 2,
        waiting: Callable[[tuple[int, ...]], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """``keep`` complete rounds stay readable, the newest included, for a rank that starts again behind it.

        ``waiting`` is called with the missing ranks every ``poll_s`` seconds, and ``stopped`` asked whether to go on
        waiting. The folder belongs to one run.
        """
        if not 0 <= rank < world_size or keep < 1:
            raise ValueError(f"rank {rank} of {world_size}, keeping {keep} rounds: there is no such thing")
        self.rank, self.world_size, self.uri = rank, world_size, str(uri)
        self._store = Store(uri)
        self._timeout_s, self._poll_s, self._keep = timeout_s, poll_s, keep
        self._waiting, self._stopped = waiting, stopped

    def average(self, round_number: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The mean over all ranks of each tensor, in its own dtype, on the CPU.

        ``MissingRanks`` when not all have given theirs in time, ``Stopped`` when told to stop before that; the same
        call may then be repeated. ``ValueError`` when ranks disagree on their number or on the tensors, or when this
        round is over and gone.
        """
        self._require_open(round_number)
        folder = _folder(round_number)
        self._put(f"{folder}/{self._name(self.rank)}", tensors)
        self._wait(round_number)
        mean = self._mean(folder, tensors)
        if self.rank == 0:
            self._remove_before(round_number - self._keep + 1)
        return mean

    def _require_open(self, round_number: int) -> None:
        """A newer round exists only if all had given theirs to this one; if that is gone, this rank is too old."""
        newest = max(self._rounds(), default=round_number)
        if newest > round_number and self.rank in self._missing(_folder(round_number)):
            raise ValueError(
                f"{self.uri} is at round {newest}, and rank {self.rank} comes with the state of round "
                f"{round_number}: start it with the run folder that it had, or all ranks with another {self.uri}"
            )

    def _put(self, name: str, tensors: Sequence[Tensor]) -> None:
        with suppress(
            FileExistsError
        ):  # it is there since before this rank was started again; others may have read it
            self._store.create(name, to_bytes(list(tensors)))

    def _wait(self, round_number: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while missing := self._missing(_folder(round_number)):
            if self._stopped():
                raise Stopped(f"round {round_number} in {self.uri}")
            self._waiting(missing)
            if time.monotonic() > deadline:
                names = ", ".join(map(str, missing))
                raise MissingRanks(
                    f"round {round_number} in {self.uri}: nothing from rank {names} of {self.world_size} "
                    f"in {self._timeout_s:g} s",
                    missing,
                )
            time.sleep(self._poll_s)

    def _missing(self, folder: str) -> tuple[int, ...]:
        found = [match for name in self._store.names(folder) if (match := _RANK.fullmatch(name))]
        for match in found:
            if int(match[2]) != self.world_size:
                raise ValueError(
                    f"{self.uri}: rank {match[1]} is one of {match[2]}, not of {self.world_size}"
                )
        return tuple(sorted(set(range(self.world_size)) - {int(match[1]) for match in found}))

    def _mean(self, folder: str, like: Sequence[Tensor]) -> list[Tensor]:
        total: list[Tensor] = []
        for rank in range(self.world_size):
            given: list[Tensor] = from_bytes(self._store.read(f"{folder}/{self._name(rank)}"))
            shapes = [(t.shape, t.dtype) for t in given]
            if shapes != [(t.shape, t.dtype) for t in like]:
                raise ValueError(f"{self.uri}: the tensors of rank {rank} are not those of rank {self.rank}")
            total = [t.add_(more) for t, more in zip(total, given, strict=True)] if total else given
        return [t.div_(self.world_size) for t in total]

    def _remove_before(self, round_number: int) -> None:
        for old in self._rounds():
            if old < round_number:
                self._store.remove(_folder(old))

    def _rounds(self) -> list[int]:
        return [int(match[1]) for name in self._store.names() if (match := _ROUND.fullmatch(name))]

    def _name(self, rank: int) -> str:
        return f"rank-{rank}-of-{self.world_size}.safetensors"


def _folder(round_number: int) -> str:
    return f"round-{round_number:08d}"
