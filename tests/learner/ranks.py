"""One of several processes of the trainer: ``python -m learner.ranks OUT LOSS...``, in the folder of the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from .factory import make_groups, tiny_model
from .training import train


def main(out: Path, loss_types: list[str]) -> None:
    """Train two steps with each loss, and let the first process write down gradients, weights and metrics."""
    torch.set_num_threads(1)
    results = {loss_type: steps(loss_type, out.parent / "trainer") for loss_type in loss_types}
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(results, out)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def steps(loss_type: str, folder: Path) -> dict[str, Any]:
    """Two steps on three groups; what they did."""
    groups = make_groups(3, 2, sites=2, pairs=1, logprob=-3.7)
    model = tiny_model()
    settings: dict[str, Any] = {"grad_norm_every": 1, "micro_batches": 4, "loss_type": loss_type}
    record = train(model, [groups, groups], folder, **settings)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"gradients": record.gradients, "weights": weights, "metrics": record.metrics}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
