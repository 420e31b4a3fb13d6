"""A few steps of PRIME-RL's loss with hints and pairs, on a recorded run and without PRIME-RL.

    python examples/prime_rl/step.py runs/smoke --groups 4

Each sequence is scored as PRIME-RL's parts would: the hinted contexts by the start model as the teacher, the
responses of pairs by the policy and by the start model as the reference.
"""

from __future__ import annotations

import argparse
import copy
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hintloop.learner.adapters.prime_rl import LossInputs, LossOutputs, loss_fn, training_samples
from hintloop.learner.adapters.samples import model_score
from hintloop.learner.source import GroupSource
from hintloop.replay.journal import Journal

CONFIGURATION = Path(__file__).with_name("trainer.toml")


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, print a table, and return the loss of each step."""
    options = _options(arguments)
    torch.manual_seed(0)
    settings = tomllib.loads(CONFIGURATION.read_text())["trainer"]["loss"]["kwargs"]
    model = AutoModelForCausalLM.from_pretrained(options.run / "student", dtype=torch.float32)
    start = model_score(copy.deepcopy(model))
    groups = GroupSource(Journal(options.run / "journal"), follow=False).take(options.groups)
    samples = training_samples(groups, teacher=start, policy=model_score(model), reference=start)
    tokens = sum(sum(sample["mask"]) for sample in samples)
    print(f"{len(groups)} groups, {len(samples)} sequences, {tokens} trained tokens")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses = []
    for step in range(options.steps):
        results = [_loss(model, sample, settings) for sample in samples]
        optimizer.zero_grad()
        loss = torch.stack([result.loss for result in results]).sum() / tokens
        loss.backward()
        optimizer.step()
        hinted = [r.metrics for r in results if r.metrics["hint/tokens"]]
        count = sum(float(m["hint/tokens"]) for m in hinted)
        gap = sum(float(m["hint/gap"] * m["hint/tokens"]) for m in hinted) / max(1.0, count)
        losses.append(float(loss.detach()))
        print(f"step {step}: loss {losses[-1]:8.5f}, {count:.0f} hinted tokens, log q - log pi {gap:7.4f}")
    return losses


def _loss(model: Any, sample: dict[str, Any], settings: dict[str, Any]) -> LossOutputs:
    """As its trainer calls it: log-probabilities of each token, of the first one a placeholder."""
    ids = torch.tensor(sample["token_ids"])
    every = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    logprobs = every.gather(-1, ids[1:, None])[:, 0]
    reference = sample.get("ref_logprobs")
    inputs = LossInputs(
        trainer_logprobs=torch.cat([torch.zeros(1), logprobs]),
        inference_logprobs=torch.tensor(sample["logprobs"]),
        ref_logprobs=None if reference is None else torch.tensor(reference),
        advantages=torch.tensor(sample["advantages"]),
        loss_mask=torch.tensor(sample["mask"]),
    )
    result: LossOutputs = loss_fn(inputs, **settings)
    return result


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="step.py"
    )
    parser.add_argument("run", type=Path, help="folder with a recorded journal and the student that began it")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-4, help="step size of AdamW (default: %(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
