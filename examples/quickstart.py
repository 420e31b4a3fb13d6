"""The three channels of a training step on one small story, without a trainer or an environment.

Example:

    python examples/quickstart.py --steps 8
    python examples/quickstart.py Qwen/Qwen2.5-0.5B-Instruct --variant binary_search --lr 1e-5
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hintloop.learner.losses.compose import compose_loss, with_reference
from hintloop.learner.losses.example_batch import build_batch

BUNDLED = Path(str(files("hintloop.agent.student"))) / "student-tiny"
COLUMNS = ("step", "total", "lm_ce", "sdpo_jsd", "trace_replay_dpo")


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, print a table of the components, and return the total of each step in nats."""
    options = _options(arguments)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    batch = with_reference(build_batch(tokenizer, options.variant), model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    print("  ".join(COLUMNS))
    totals = []
    for step in range(options.steps):
        losses = compose_loss(model, batch, alpha_sdpo=options.alpha, beta_replay=options.beta)
        optimizer.zero_grad()
        losses.total.backward()
        optimizer.step()
        now = losses.detached()
        totals.append(float(now.total))
        values = (now.total, now.lm_ce, now.sdpo_jsd, now.trace_replay_dpo)
        cells = (f"{step:4d}", *(_cell(value) for value in values))
        print("  ".join(cell.rjust(len(name)) for cell, name in zip(cells, COLUMNS, strict=True)))
    return totals


def _cell(value: Tensor | None) -> str:
    return "-" if value is None else f"{float(value):.3f}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="quickstart.py"
    )
    parser.add_argument("model", nargs="?", default=str(BUNDLED), help="folder or hub name of a causal LM")
    parser.add_argument("--variant", default="factorial", choices=["factorial", "binary_search"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3, help="step size of AdamW (default: %(default)s)")
    parser.add_argument("--alpha", type=float, default=1.0, help="weight of hint distillation; 0 is off")
    parser.add_argument("--beta", type=float, default=1.0, help="weight of preferences; 0 is off")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
