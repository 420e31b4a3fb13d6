"""Time of an optimizer step with all three channels, over one with the reward alone, on the same episodes.

python benchmarks/step_cost.py --sites 1 --pairs 0.5 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from collate import episode_groups
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback

from hintloop.agent.student.build import new_model
from hintloop.learner.batch import BatchRules, build_step
from hintloop.learner.config import LearnerConfig
from hintloop.learner.models import SideWeights, make_optimizer
from hintloop.learner.trainer import ThreeChannelTrainer

VOCABULARY = 960
CHANNELS = {
    "reward": {"alpha_sdpo": 0.0, "beta_replay": 0.0},
    "reward, hints": {"beta_replay": 0.0},
    "reward, preferences": {"alpha_sdpo": 0.0},
    "all three": {},
}


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def step_seconds(groups: Any, args: argparse.Namespace, channels: dict[str, float], folder: Path) -> float:
    """Median of ``args.steps`` steps, the first one left out."""
    config = LearnerConfig(
        steps=args.steps + 1,
        micro_batches=args.micro_batches,
        grad_norm_every=0,
        max_staleness=None,
        **channels,
    )
    number = args.groups * args.size
    rules = BatchRules(
        VOCABULARY,
        config.micro_batches,
        max_sites=round(number * args.sites) if config.alpha_sdpo else 0,
        max_pairs=round(number * args.pairs) if config.beta_replay else 0,
    )
    torch.manual_seed(0)
    model, clock = new_model(VOCABULARY, end_of_turn=1), Clock()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>")), pad_token="<pad>"
    )
    ThreeChannelTrainer(
        model,
        tokenizer,
        config,
        (build_step(groups, rules, version=0, seed=(0,)) for _ in range(config.steps)),
        side=SideWeights.of(model, config),
        optimizer=make_optimizer(model, config),
        output_dir=folder,
        callbacks=[clock],
    ).train()
    times = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
    return statistics.median(times[1:])


def main() -> None:
    """Print the seconds of each kind of step, and its ratio to the reward alone in the same round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--size", type=int, default=8, help="episodes of a group")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of an episode")
    parser.add_argument("--sites", type=float, default=1.0, help="hint sites per episode")
    parser.add_argument("--pairs", type=float, default=0.5, help="preference pairs per episode")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps of a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    groups = episode_groups(args, vocabulary=VOCABULARY)
    with tempfile.TemporaryDirectory() as folder:
        rounds = [
            {name: step_seconds(groups, args, kind, Path(folder)) for name, kind in CHANNELS.items()}
            for _ in range(args.rounds)
        ]
    result = {}
    for name in CHANNELS:
        ratios = sorted(found[name] / found["reward"] for found in rounds)
        result[name] = {
            "seconds": round(statistics.median(found[name] for found in rounds), 3),
            "ratio": round(statistics.median(ratios), 2),
            "ratio_lowest": round(ratios[0], 2),
            "ratio_highest": round(ratios[-1], 2),
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
