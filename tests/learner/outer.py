"""Replicas of a toy, a process each: ``python -m learner.outer OUT COUNT LIGHTHOUSE URI...``, in the tests' folder.

Each writes down what it measured: an average over each URI, and the parameters after a few outer rounds over the
lighthouse's network and over each URI.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hintloop.learner.replicas.diloco import make_diloco_outer_loop, split_parameters
from hintloop.learner.replicas.live import ReplicaManager
from hintloop.learner.replicas.manager import StoreManager
from hintloop.learner.replicas.store import ObjectStoreAllReduce

ROUNDS = 3
SCHEDULES: dict[str, dict[str, Any]] = {
    "whole": {"fragments": 1, "sync_every": 4},
    "streaming": {
        "fragments": 2,
        "sync_every": 8,
        "fragment_sync_delay": 2,
        "fragment_update_alpha": 0.5,
    },
}


def toy() -> nn.Module:
    """The start that all replicas share."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def contribution(index: int) -> list[Tensor]:
    """What a replica brings to a plain average."""
    random = torch.Generator().manual_seed(index)
    return [torch.randn(shape, generator=random) for shape in ((3, 4), (7,), ())]


def train(manager: Any, index: int, fragments: int, **schedule: Any) -> list[Tensor]:
    """The global parameters after ``ROUNDS`` rounds on data of the replica's own."""
    model = toy()
    groups = split_parameters(model, fragments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with make_diloco_outer_loop(manager, groups, optimizer, **schedule) as loop:
        for step in range(ROUNDS * schedule["sync_every"]):
            inner_step(model, optimizer, index, step)
        globals_ = [value for each in loop._fragments for value in each.original_parameters.values()]
    manager.shutdown()
    return globals_


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int, step: int) -> None:
    """One step on data that differ from replica to replica."""
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(1000 * index + step))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True) + 0.3 * index)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def measure(out: Path, index: int, count: int, lighthouse: str, uris: list[str]) -> None:
    """Everything, one after another."""
    results: dict[str, Any] = {}
    waits: dict[str, Any] = {"timeout_s": 120.0, "poll_s": 0.2}
    for place, uri in zip(("file", "s3"), uris, strict=True):
        reduce = ObjectStoreAllReduce(f"{uri}/plain", index, count, **waits)
        results[f"average {place}"] = [reduce.average(n, contribution(index)) for n in range(3)][-1]
        for name, schedule in SCHEDULES.items():
            reduce = ObjectStoreAllReduce(f"{uri}/{name}", index, count, **waits)
            results[f"{name} {place}"] = train(StoreManager(reduce), index, **schedule)
    for name, schedule in SCHEDULES.items():
        manager = ReplicaManager(index, count, lighthouse, min_replicas=count)
        results[f"{name} gloo"] = train(manager, index, **schedule)
    torch.save(results, out / f"{index}.pt")


def main(out: Path, count: int, lighthouse: str, uris: list[str]) -> int:
    """Fork a process per replica, once the libraries are there; how many failed."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    replicas = [context.Process(target=measure, args=(out, i, count, lighthouse, uris)) for i in range(count)]
    for replica in replicas:
        replica.start()
    for replica in replicas:
        replica.join()
    return sum(replica.exitcode != 0 for replica in replicas)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
