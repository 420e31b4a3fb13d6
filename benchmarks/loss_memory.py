"""Peak memory and time of the hint divergence, forward and backward, at the vocabulary of a real model.

The student reads T tokens, K of which are compared with the teacher. "plain" is what a textbook would do: the logits
of all T tokens of both models and their divergence, then a mask that leaves the K. "TRL" is TRL's chunked kernel on
all T tokens, masked to the K. "gathered" takes the K hidden states first and then dense logits; "ours" is
``fused_generalized_jsd``. Each runs in a process of its own, so that its peak is its own; the inputs' memory is not
counted. A trained head has a gradient of its own size (0.51 GiB here), whoever computes it.

python benchmarks/loss_memory.py --tokens 512 1024 --compared 16 64 256
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from hintloop.learner.losses.divergence import fused_generalized_jsd, generalized_jsd
from hintloop.learner.losses.head import Head

KINDS = ("plain", "TRL", "gathered", "ours")
BETA = 0.5


def plain(student: Tensor, teacher: Tensor, head: Head, compared: Tensor) -> Tensor:
    """All logits and divergences, then those of the compared positions."""
    with torch.no_grad():
        target = head.logits(teacher)
    divergence = generalized_jsd(head.logits(student), target, beta=BETA)
    return (divergence * compared).sum() / compared.sum()


def trl(student: Tensor, teacher: Tensor, head: Head, compared: Tensor) -> Tensor:
    """TRL's kernel over all positions, as its distillation trainer calls it away from a GPU."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    parts = ChunkedDivergenceFunction.apply(
        student, head.weight, None, teacher, head.weight.detach(), None, BETA, 1.0, 1.0, None, 1.0, None
    )
    return (parts[0] * compared).sum() / compared.sum()


def gathered(student: Tensor, teacher: Tensor, head: Head, compared: Tensor) -> Tensor:
    """The compared positions first, then their logits."""
    with torch.no_grad():
        target = head.logits(teacher[compared])
    return generalized_jsd(head.logits(student[compared]), target, beta=BETA).mean()


def ours(student: Tensor, teacher: Tensor, head: Head, compared: Tensor) -> Tensor:
    """What the trainer does."""
    states = (student[compared], teacher[compared])
    return fused_generalized_jsd(*states, head, Head(head.weight.detach()), beta=BETA).mean()


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Head, Tensor], Tensor]] = {
    "plain": plain,
    "TRL": trl,
    "gathered": gathered,
    "ours": ours,
}


def child(kind: str, args: argparse.Namespace) -> None:
    """Measure one kind and print it."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    (tokens,), (number,) = args.tokens, args.compared
    weight = (
        torch.randn(args.vocabulary, args.width).mul_(args.width**-0.5).requires_grad_(args.head == "trained")
    )
    student = torch.randn(tokens, args.width, requires_grad=True)
    teacher = torch.randn(tokens, args.width)
    compared = torch.zeros(tokens, dtype=torch.bool)
    compared[torch.linspace(0, tokens - 1, number).long()] = True
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    loss = FUNCTIONS[kind](student, teacher, Head(weight), compared)
    loss.backward()
    seconds = time.perf_counter() - started
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    assert student.grad is not None
    norm = float(student.grad.norm())
    print(json.dumps({"peak_gib": peak, "seconds": seconds, "loss": float(loss), "gradient_norm": norm}))


def measured(kind: str, shape: tuple[int, int], args: argparse.Namespace) -> dict[str, float]:
    """What ``child`` says in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--child",
        kind,
        "--tokens",
        str(shape[0]),
        "--compared",
        str(shape[1]),
    ]
    command += ["--vocabulary", str(args.vocabulary), "--width", str(args.width)]
    command += ["--head", args.head, "--threads", str(args.threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print one row per shape and kind, with its peak and time as a part of the plain one's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[512], help="T")
    parser.add_argument("--compared", type=int, nargs="+", default=[64], help="K")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--head", choices=["frozen", "trained"], default="frozen")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args)
        return
    for shape in itertools.product(args.tokens, args.compared):
        rows = {kind: measured(kind, shape, args) for kind in args.kinds}
        for kind, row in rows.items():
            parts = (
                {f"{key}_of_plain": row[key] / rows["plain"][key] for key in ("peak_gib", "seconds")}
                if "plain" in rows
                else {}
            )
            found = {name: round(value, 4) for name, value in (row | parts).items()}
            print(json.dumps({"tokens": shape[0], "compared": shape[1], "kind": kind, **found}), flush=True)


if __name__ == "__main__":
    main()
