"""Who takes part in an outer round, as torchft's DiLoCo and the learner ask it; here over an object store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from hintloop.learner.replicas.store import ObjectStoreAllReduce, Stopped


class OuterManager(Protocol):
    """What the learner asks, beside what DiLoCo asks. Replicas are known by their numbers."""

    index: int
    """Of this replica."""
    members: tuple[int, ...]
    """Replicas of the newest quorum, ascending; before the first, those that are expected."""
    contributors: tuple[int, ...]
    """Members whose training entered the newest average: all but those that had just been healed."""
    committed: bool
    """Whether the newest average counts."""

    def current_step(self) -> int:
        """Committed averages, of any fragment."""
        ...

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Let a state be part of what a healed replica takes over."""
        ...

    def state_dict(self) -> dict[str, int]:
        """For a checkpoint."""
        ...

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from a checkpoint."""
        ...

    def shutdown(self) -> None:
        """Leave."""
        ...


class StoreManager:
    """Runs torchft's DiLoCo over an object store: a fixed set of replicas, and no network between them.

    Nobody is healed: a replica that dies is waited for, and goes on from its own checkpoint. Tensors that were
    handed in since the last wait travel as one object. An average is not committed when this replica was told to stop
    before it was complete; the others may commit it.
    """

    _use_async_quorum = False  # DiLoCo looks at it
    committed = True

    def __init__(self, reduce: ObjectStoreAllReduce) -> None:
        self._reduce = reduce
        self._step = 0
        self._pending: list[Tensor] = []
        self.index = reduce.rank
        self.members = self.contributors = tuple(range(reduce.world_size))

    def current_step(self) -> int:
        """Committed averages."""
        return self._step

    def start_quorum(self) -> None:
        """All take part, always."""
        self.committed = True

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> _Pending:
        """The tensor becomes the mean over all replicas when what this returns is waited for."""
        if should_quantize:
            raise ValueError("averages over an object store are not quantised")
        self._pending.append(tensor)
        return _Pending(self._flush)

    def should_commit(self) -> bool:
        """Whether the average was waited for; one that failed has raised, so there is nothing to vote about."""
        self._step += self.committed
        return self.committed

    def disallow_state_dict_read(self) -> None:
        """Nobody reads."""

    def allow_state_dict_read(self) -> None:
        """Nobody reads."""

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Nobody is healed, so nothing is to be taken over."""

    def state_dict(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"step": self._step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from a checkpoint."""
        self._step = state_dict["step"]

    def shutdown(self) -> None:
        """Nothing is open."""

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if not pending:
            return
        try:
            means = self._reduce.average(self._step, pending)
        except Stopped:
            self.committed = False
            return
        for tensor, mean in zip(pending, means, strict=True):
            tensor.copy_(mean)


class _Pending:
    """A piece of a round, in the shape of a work of torch.distributed."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self) -> bool:
        """Until the average is there."""
        self._wait()
        return True


MockManager = StoreManager
"""The name that an earlier public replication gave it."""
