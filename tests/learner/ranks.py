"""One of several processes of the trainer: ``python -m learner.ranks OUT CASE...``, in the folder of the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from hintloop.learner.ranks import leave_process_group

from .factory import make_groups, tiny_model, uneven_groups
from .training import train

CASES = {
    f"{loss_type}, {shares} shares": (loss_type, shares == "uneven")
    for loss_type in ("dapo", "grpo")
    for shares in ("even", "uneven")
}
"""Loss, and whether one of two processes gets more rows, and the other no hints, no pairs or nothing at times."""


def main(out: Path, cases: list[str]) -> None:
    """Train two steps of each case, and let the first process write down gradients, weights and metrics."""
    torch.set_num_threads(1)
    results = {case: steps(case, out.parent / "trainer") for case in cases}
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(results, out)
    leave_process_group()


def steps(case: str, folder: Path) -> dict[str, Any]:
    """Two steps; what they did."""
    loss_type, uneven = CASES[case]
    groups = uneven_groups() if uneven else 2 * [make_groups(3, 2, sites=2, pairs=1, logprob=-3.7)]
    model = tiny_model()
    settings: dict[str, Any] = {"grad_norm_every": 1, "micro_batches": 4, "loss_type": loss_type}
    record = train(model, groups, folder, **settings)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"gradients": record.gradients, "weights": weights, "metrics": record.metrics}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
