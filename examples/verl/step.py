"""One update with hints and pairs in verl, on a recorded run and a small model.

    .verl/bin/python examples/verl/step.py runs/smoke --groups 4

verl's workers would compute the log-probabilities, on accelerators; here a function does. The rest is verl's: the
``DataProto``, ``compute_advantage``, and its actor loss with the registered policy loss.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.workers.config import FSDPActorConfig

from hintloop.learner.adapters.verl import hint_contexts, pair_responses, to_dataproto, training_batch
from hintloop.learner.source import GroupSource
from hintloop.replay.journal import Journal

ACTOR = FSDPActorConfig(
    strategy="fsdp",
    rollout_n=1,
    ppo_micro_batch_size_per_gpu=1,
    clip_ratio_low=0.2,
    clip_ratio_high=0.28,
    policy_loss={"loss_mode": "hintloop"},
)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Update once, and print and return how far the policy is from the teacher, and the margin of the pairs, in
    nats: both before and after."""
    options = _options(arguments)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options.run / "student", dtype=torch.float32)
    start = copy.deepcopy(model).requires_grad_(False)
    data = to_dataproto(GroupSource(Journal(options.run / "journal"), follow=False).take(options.groups))
    hints, pairs = hint_contexts(data), pair_responses(data)
    scored = {
        "hint_log_probs": None if hints is None else _log_probs(start, hints),
        "pair_log_probs": None if pairs is None else _log_probs(model, pairs).detach(),
        "pair_reference": None if pairs is None else _log_probs(start, pairs),
    }
    step = training_batch(data, **scored)
    step = compute_advantage(step, "hintloop_grpo", config=AlgoConfig(adv_estimator="hintloop_grpo"))
    print(f"{len(data)} episodes, {0 if hints is None else len(hints)} hints, {len(step)} rows in the update")
    before = _distances(model, data, pairs, scored)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    batch = step.batch
    loss, metrics = get_policy_loss_fn("hintloop")(
        old_log_prob=batch["old_log_probs"],
        log_prob=_log_probs(model, step),
        advantages=batch["advantages"],
        response_mask=batch["response_mask"],
        loss_agg_mode="token-mean",
        config=ACTOR,
    )
    loss.backward()
    optimizer.step()
    after = _distances(model, data, pairs, scored)
    print(f"loss {float(loss):.5f}, {metrics}")
    print(f"log q - log pi of the compared tokens: {before[0]:.4f}, then {after[0]:.4f}")
    print(f"margin of the pairs: {before[1]:.4f}, then {after[1]:.4f}")
    return [*before, *after]


def _log_probs(model: Any, data: Any) -> Tensor:
    """(N, R) of the responses."""
    batch = data.batch
    named = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    width = batch["responses"].shape[1]
    logits = model(**named, use_cache=False).logits[:, -width - 1 : -1].float()
    found: Tensor = logits.log_softmax(-1).gather(-1, batch["responses"][:, :, None])[:, :, 0]
    return found


@torch.no_grad()
def _distances(model: Any, data: Any, pairs: Any, scored: dict[str, Any]) -> list[float]:
    gap = margin = 0.0
    if scored["hint_log_probs"] is not None:
        mask = data.batch["hint_response_mask"].bool()
        found = _log_probs(model, data)
        row, slot, column = mask.nonzero(as_tuple=True)
        ours = found[row, data.batch["hint_start"][row, slot] + column]
        gap = float((scored["hint_log_probs"][mask[mask.any(-1)]] - ours).mean())
    if pairs is not None:
        beyond = ((_log_probs(model, pairs) - scored["pair_reference"]) * pairs.batch["response_mask"]).sum(
            -1
        )
        chosen, rejected = beyond.split(len(beyond) // 2)
        margin = float((chosen - rejected).mean())
    return [gap, margin]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="step.py"
    )
    parser.add_argument("run", type=Path, help="folder with a recorded journal and the student that began it")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-4, help="step size of AdamW (default: %(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
