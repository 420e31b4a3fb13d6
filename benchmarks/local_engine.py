"""Sampled tokens per second of the local engine, for a model of the tiny student's shape.

``decode`` samples long continuations only; ``episodes`` plays the token traffic of coding episodes: groups
of 8 with one prompt, five turns, tool output between them, so that prompts are computed while others decode.

    python benchmarks/local_engine.py --slots 8 32 64 --threads 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hintloop.agent.engine import Sampling
from hintloop.rollout.engines.local import LocalEngine

VOCABULARY = 1000
SYSTEM, TASK, TOOL, TURN = 58, 40, 18, (4, 22)
"""Tokens of the system text, of the task, of a tool's answer; range of an assistant turn's."""


def tiny_model() -> Any:
    """0.9 M parameters, random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


async def decode(engine: LocalEngine, sessions: int, tokens: int) -> None:
    """Every session samples ``tokens`` tokens after a prompt of 100."""
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(100)] for _ in range(sessions)]
    asks = [engine.generate(p, Sampling(1.0, tokens), session=str(i)) for i, p in enumerate(prompts)]
    await asyncio.gather(*asks)


async def episodes(engine: LocalEngine, sessions: int, count: int) -> None:
    """``count`` episodes, ``sessions`` at a time."""
    system = [random.Random(0).randrange(VOCABULARY) for _ in range(SYSTEM)]
    queue = iter(range(count))

    async def play(number: int) -> None:
        task, rng = random.Random(number // 8), random.Random(number)
        ids = system + [task.randrange(VOCABULARY) for _ in range(TASK)]
        for _ in range(5):
            sample = await engine.generate(ids, Sampling(1.0, rng.randint(*TURN)), session=str(number))
            ids += [*sample.token_ids, *(rng.randrange(VOCABULARY) for _ in range(TOOL))]
        await engine.end_session(str(number))

    async def work() -> None:
        for number in queue:
            await play(number)

    await asyncio.gather(*(work() for _ in range(sessions)))


async def measure(slots: int, threads: int, kind: str, rounds: int) -> dict[str, float]:
    """One engine, one kind of traffic, after a short warm-up."""
    engine = LocalEngine(tiny_model(), [], slots=slots, max_length=512, threads=threads, seed=0)
    await decode(engine, slots, 8)
    before, started = engine.stats(), time.perf_counter()
    if kind == "decode":
        await decode(engine, slots, 100 * rounds)
    else:
        await episodes(engine, slots, 4 * slots * rounds)
    wall = time.perf_counter() - started
    gained = {name: value - before[name] for name, value in engine.stats().items()}
    await engine.close()
    return {
        "sampled_per_second": round(gained["sampled_tokens"] / wall),
        "prefilled_per_second": round(gained["prefilled_tokens"] / wall),
        "ms_per_step": round(1e3 * gained["busy_seconds"] / gained["decode_steps"], 2),
        "rows_per_step": round(gained["sampled_tokens"] / gained["decode_steps"], 1),
        "reused_tokens": gained["reused_tokens"],
        "busy_share": round(gained["busy_seconds"] / wall, 2),
    }


def main() -> None:
    """Print one JSON line for each combination."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=["decode", "episodes"], default=["decode", "episodes"])
    parser.add_argument("--rounds", type=int, default=1, help="length of the measurement")
    args = parser.parse_args()
    for kind in args.kinds:
        for slots in args.slots:
            result = asyncio.run(measure(slots, args.threads, kind, args.rounds))
            print(json.dumps({"kind": kind, "slots": slots, "threads": args.threads, **result}), flush=True)


if __name__ == "__main__":
    main()
