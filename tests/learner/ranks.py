"""One of several processes of the trainer: ``python -m learner.ranks OUT SETTINGS``, in the folder of the tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState

from .factory import make_groups, tiny_model
from .training import train


def main(out: Path, settings: dict[str, object]) -> None:
    """Train a step on three groups and let the first process write down its gradient, weights and metrics."""
    torch.set_num_threads(1)
    groups = make_groups(3, 2, sites=2, pairs=1, logprob=-3.7)
    model = tiny_model()
    record = train(model, [groups, groups], out.parent / "trainer", grad_norm_every=1, **settings)  # type: ignore[arg-type]
    if PartialState().is_main_process:
        weights = {name: p.detach() for name, p in model.named_parameters()}
        torch.save({"gradients": record.gradients, "weights": weights, "metrics": record.metrics}, out)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
