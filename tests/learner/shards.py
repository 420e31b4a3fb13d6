"""One of several processes with a part of the model each: ``python -m learner.shards OUT CASE...``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from hintloop.learner.config import LearnerConfig
from hintloop.learner.lora import add_lora
from hintloop.learner.ranks import leave_process_group
from hintloop.learner.sharding import is_sharded, shard, whole

from .factory import tiny_model, uneven_groups
from .training import train

CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied": False},
    "trust region": {"teacher": "trust_region", "teacher_rate": 0.3, "correction": "icepop"},
    "live": {"teacher": "live"},
    "frozen": {"teacher": "frozen", "activation_checkpointing": True},
    "adapters": {"lora_rank": 4, "learning_rate": 0.01},
}


def main(out: Path, cases: list[str]) -> None:
    """Train two steps of each case, and let each process write down what it held and made of it."""
    torch.set_num_threads(1)
    results = {case: steps(case, out / "trainer", sharded=True) for case in cases}
    torch.save(results, out / f"{os.environ['RANK']}.pt")
    leave_process_group()


def steps(case: str, folder: Path, *, sharded: bool = False) -> dict[str, Any]:
    """Two steps on four micro-batches; what this process held and made of it."""
    settings = {"micro_batches": 4, "max_grad_norm": 1.0, "grad_norm_every": 0, **CASES[case]}
    model = tiny_model(tied=settings.pop("tied", True))
    if rank := settings.get("lora_rank"):
        model = add_lora(model, LearnerConfig(lora_rank=rank))
    if sharded:
        shard(model)
    record = train(model, uneven_groups(), folder, **settings)
    held = sum((p.to_local() if is_sharded(model) else p).numel() for p in model.parameters())
    return {
        "held": held,
        "gradients": record.gradients,
        "weights": {name: whole(p.detach()) for name, p in model.named_parameters()},
        "teacher": {name: whole(p) for name, p in (record.trainer.side.teacher or {}).items()},
        "metrics": record.metrics,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
