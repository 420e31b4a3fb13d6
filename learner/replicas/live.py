"""Replicas over a network: torchft's manager, with what DiLoCo's averages and a safe start need on top.

Beside torchft itself: who contributed is part of every round, so a replica that has just been healed adds nothing
instead of the donor's training for a second time; healing runs no foreign code; and a replica that is left alone
with an old state stops rather than begin again.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

from hintloop.learner.replicas.transport import SafetensorsTransport

MAX_REPLICAS = 1024
_LOOPBACK = ("lo", "lo0")


class StateLost(ValueError):
    """No replica of the quorum has the newest published round, so training would begin again."""


class ReplicaManager(Manager):  # type: ignore[misc]
    """One replica, a single process, among those that the same lighthouse knows."""

    def __init__(
        self,
        index: int,
        expected: int,
        lighthouse: str,
        *,
        host: str = "127.0.0.1",
        timeout_s: float = 60.0,
        quorum_timeout_s: float = 3600.0,
        min_replicas: int = 1,
        floor: int = 0,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Replica ``index``; 0 to ``expected - 1`` are there from the start, higher ones may join.

        ``lighthouse`` is its URL. ``host`` is this machine's address for the others, where states are served; they
        are served to anybody who can connect. torchft's own ports listen on all addresses. ``timeout_s`` is for one
        exchange, ``quorum_timeout_s`` for how long others may train. ``floor``: the averages that are known to have
        been committed; a quorum that knows of fewer raises ``StateLost``. ``waiting`` is called at each quorum.
        """
        if not 0 <= index < MAX_REPLICAS:
            raise ValueError(f"replicas have numbers from 0 to {MAX_REPLICAS - 1}, not {index}")
        if host.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
        self.index, self._floor, self._waiting = index, floor, waiting
        self.members = self.contributors = tuple(range(expected))
        self.committed = self._healed = False
        timeout = timedelta(seconds=timeout_s)
        self._rendezvous = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        super().__init__(
            pg=_process_group(timeout),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=min_replicas,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=timedelta(seconds=quorum_timeout_s),
            connect_timeout=timeout,
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self._rendezvous.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica_{index}",
            hostname=host,
            checkpoint_transport=SafetensorsTransport(host, timeout_s=timeout_s),
            init_sync=False,  # all begin with the same student
        )

    def start_quorum(self, *args: Any, **options: Any) -> None:
        """Meet the others, take over a state if this one is behind, and tell each other who has trained."""
        self._waiting()
        before = self.current_step()
        super().start_quorum(*args, **options)
        self._healed = self.current_step() != before
        if self.errored() is None and self.current_step() < self._floor:
            raise StateLost(
                f"average {self._floor} has been published, and no live replica has more than "
                f"{self.current_step()}: start one that has it, or go on with another weight store"
            )
        present, trained = torch.zeros(2, MAX_REPLICAS, device=_device())
        present[self.index] = 1.0
        trained[self.index] = float(self.index in self.members and not self._healed)
        for flags in (present, trained):
            super().allreduce(flags).wait()
        if self.errored() is None:
            self.members, self.contributors = _set(present), _set(trained)

    def allreduce(self, tensor: Tensor, *args: Any, **options: Any) -> Any:
        """The tensor becomes the mean over the contributors."""
        if self.index not in self.contributors:
            tensor.zero_()
        elif len(self.contributors) < self.num_participants():
            # torchft divides by all that are there
            tensor.mul_(self.num_participants() / len(self.contributors))
        return super().allreduce(tensor, *args, **options)

    def should_commit(self, *args: Any, **options: Any) -> bool:
        """Whether all went well, here."""
        self.committed = bool(super().should_commit(*args, **options))
        return self.committed


def _set(flags: Tensor) -> tuple[int, ...]:
    return tuple(flags.nonzero().flatten().tolist())


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _process_group(timeout: timedelta) -> Any:
    return (ProcessGroupNCCL if torch.cuda.is_available() else ProcessGroupGloo)(timeout)


def _loopback() -> str:
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in _LOOPBACK if name in names), _LOOPBACK[0])
