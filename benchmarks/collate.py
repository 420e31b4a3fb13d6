"""Million tokens per second from episodes in memory to the tensors of one optimizer step, on one core.

Counted twice: the tokens of the episodes, and those of the rows that come out, which hold the beginning of an episode
once more for a hinted context and for the reference model.

python benchmarks/collate.py --groups 32 --size 8 --tokens 2000
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time

import numpy as np

from hintloop.learner.batch import BatchRules, StepBatch, build_step
from hintloop.learner.packing import PADDING
from hintloop.replay.episode import Episode, HintSite, Outcome, PreferencePair, Turn

VOCABULARY = 32_000
PROMPT, TURN, TOOL, HINT = 64, 14, 36, 21
"""Tokens of the first prompt, an assistant turn, a tool's answer with the generation prompt behind it, and a hint:
the means of the laptop preset's episodes."""


def episode(
    name: str,
    group: str,
    random: np.random.Generator,
    tokens: int,
    extras: tuple[int, int],
    *,
    vocabulary: int = VOCABULARY,
) -> Episode:
    """Random tokens in turns of a fixed size; random turns are hint sites and have pairs."""
    ids = tuple(random.integers(2, vocabulary, tokens).tolist())
    starts = range(PROMPT, tokens - TURN, TURN + TOOL)
    turns = [random.permutation(len(starts))[:number].tolist() for number in extras]
    mask = np.zeros(tokens, dtype=np.int64)
    for start in starts:
        mask[start : start + TURN] = 1
    sites = tuple(
        HintSite(n, "type_error", "a hint", starts[n] - 3, starts[n], starts[n] + TURN, ids[:HINT])
        for n in turns[0]
    )
    pairs = tuple(
        PreferencePair(n, at, ids[:TURN], ids[at : at + TURN], "", "", 1, 1, True, ("t",))
        for n, at in ((n, starts[n]) for n in turns[1])
    )
    return Episode(
        episode_id=name,
        group_id=group,
        task_id="toy/1",
        env="toy",
        source="rollout",
        created_at=0.0,
        model="toy",
        tokenizer_fingerprint="none",
        token_ids=ids,
        loss_mask=tuple(mask.tolist()),
        logprobs=tuple(np.where(mask, -random.random(tokens), 0.0).tolist()),
        policy_versions=tuple((mask - 1).tolist()),
        turns=tuple(Turn("assistant", start, start + TURN, "") for start in starts),
        outcome=Outcome.SOLVED,
        reward=float(random.random()),
        hint_sites=sites,
        pairs=pairs,
    )


def episode_groups(args: argparse.Namespace, vocabulary: int = VOCABULARY) -> list[list[Episode]]:
    """``args.groups`` groups of ``args.size`` episodes."""
    random, extras = np.random.default_rng(0), (math.ceil(args.sites), math.ceil(args.pairs))
    return [
        [
            episode(f"e{g}-{n}", f"g{g}", random, args.tokens, extras, vocabulary=vocabulary)
            for n in range(args.size)
        ]
        for g in range(args.groups)
    ]


def _row_tokens(step: StepBatch) -> int:
    """Tokens of all rows, without padding."""
    passes = [p for batch in step.micro_batches for p in (batch.student, batch.teacher, batch.reference)]
    return sum(int((p.branch != PADDING).sum()) for p in passes)


def main() -> None:
    """Print the median and the spread over the repeats."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--size", type=int, default=8, help="episodes of a group")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of an episode")
    parser.add_argument("--sites", type=int, default=1, help="hint sites of an episode")
    parser.add_argument("--pairs", type=int, default=1, help="preference pairs of an episode")
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=None, help="cap of a context")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    groups = episode_groups(args)
    rules = BatchRules(
        VOCABULARY,
        args.micro_batches,
        max_sites=args.groups * args.size * args.sites,
        max_pairs=args.groups * args.size * args.pairs,
        max_tokens=args.max_tokens,
    )
    tokens, rates = args.groups * args.size * args.tokens, []
    for _ in range(args.repeats + 1):
        started = time.perf_counter()
        step = build_step(groups, rules, version=0, seed=(0,))
        rates.append(tokens / (time.perf_counter() - started) / 1e6)
    rates = sorted(rates[1:])  # the first one warms up
    median = statistics.median(rates)
    result = {
        "million_tokens_per_second": round(median, 2),
        "million_row_tokens_per_second": round(median * _row_tokens(step) / tokens, 2),
        "slowest": round(rates[0], 2),
        "fastest": round(rates[-1], 2),
        "tokens": tokens,
        "repeats": args.repeats,
    }
    if args.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:26} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
