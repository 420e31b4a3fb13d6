"""Runs under a Python that has verl: one step of our channels through verl's own functions.

``verl_step.py FOLDER EXAMPLE``: reads ``journal`` and the models ``student``, ``teacher`` and ``reference`` from the
folder, runs the example on it, and writes ``found.json``, and ``gradient.npy``, into it.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

REGISTERED = {
    "loss": core_algos.POLICY_LOSS_REGISTRY.get("hintloop"),
    "estimator": core_algos.ADV_ESTIMATOR_REGISTRY.get("hintloop_grpo"),
}
"""Before anything here imports the adapter."""

from hintloop.learner.adapters import verl as adapter  # noqa: E402
from hintloop.learner.source import GroupSource  # noqa: E402
from hintloop.replay.journal import Journal  # noqa: E402

ALPHA, REPLAY, DPO_BETA = 0.3, 0.7, 0.4
ACTOR = FSDPActorConfig(
    strategy="fsdp",
    rollout_n=1,
    ppo_micro_batch_size_per_gpu=1,
    clip_ratio=0.2,
    clip_ratio_low=0.2,
    clip_ratio_high=0.28,
    loss_agg_mode="token-mean",
    policy_loss={"loss_mode": "hintloop"},
)


def main(folder: Path, example: Path) -> None:
    """See above."""
    models = {name: load(folder / name) for name in ("student", "teacher", "reference")}
    groups = GroupSource(Journal(str(folder / "journal")), follow=False).take(1000)
    data = adapter.to_dataproto(groups)
    step = advantages(make_batch(data, models))
    loss, metrics = trained(models["student"], step)
    loss.backward()
    gradient = torch.cat([p.grad.flatten().double() for p in models["student"].parameters()])
    np.save(folder / "gradient.npy", gradient.numpy())
    found = {
        "registered": all(function is not None for function in REGISTERED.values()),
        "same": REGISTERED["loss"] is adapter.policy_loss,
        "metrics": sorted(metrics),
        "shapes": {name: list(tensor.shape) for name, tensor in data.batch.items()},
        "episodes": len(data),
        "rows": len(step),
        "tokens": int(step.batch["response_mask"].sum()),
        "hint_tokens": int(data.batch["hint_response_mask"].sum()),
        "plain": plain(data),
        "vanilla": vanilla(data),
        "masked": masked(step),
        "moved": moved(data, models["teacher"]),
        "aligned": aligned(data),
        "refusals": refusals(data),
        "example": runpy.run_path(str(example))["main"]([str(folder), "--lr", "1e-3"]),
    }
    (folder / "found.json").write_text(json.dumps(found))


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def log_probs(model: Any, data: Any) -> torch.Tensor:
    """(N, R) of the responses."""
    counts = data.batch["attention_mask"][:, data.batch["prompts"].shape[1] :].sum(-1).tolist()
    width = data.batch["responses"].shape[1]
    rows = [
        functional.pad(values[-count - 1 : -1], (0, width - count))
        for values, count in zip(token_logprobs(model, data), counts, strict=True)
    ]
    return torch.stack(rows)


def token_logprobs(model: Any, data: Any) -> list[torch.Tensor]:
    """Of each row its n tokens: at i that of token i + 1, at the last one nothing."""
    found = []
    for ids, attended in zip(data.batch["input_ids"], data.batch["attention_mask"], strict=True):
        own = ids[attended.bool()][None]
        every = model(input_ids=own).logits[0, :-1].double().log_softmax(-1)
        values = every.gather(1, own[0, 1:, None])[:, 0]
        found.append(torch.cat([values, values.new_zeros(1)]))
    return found


def make_batch(data: Any, models: dict[str, Any]) -> Any:
    hints, pairs = adapter.hint_contexts(data), adapter.pair_responses(data)
    with torch.no_grad():
        return adapter.training_batch(
            data,
            hint_log_probs=log_probs(models["teacher"], hints),
            pair_log_probs=log_probs(models["student"], pairs),
            pair_reference=log_probs(models["reference"], pairs),
            alpha_sdpo=ALPHA,
            beta_replay=REPLAY,
            dpo_beta=DPO_BETA,
        )


def advantages(batch: Any) -> Any:
    return compute_advantage(batch, "hintloop_grpo", config=AlgoConfig(adv_estimator="hintloop_grpo"))


def trained(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    """verl's actor loss of the batch, in its format without padding."""
    values = token_logprobs(model, batch)
    rows = left_right_2_no_padding(batch.to_tensordict())
    tensordict_utils.assign_non_tensor(rows, dp_size=1, batch_num_tokens=None, global_batch_size=None)
    output = {"log_probs": torch.nested.as_nested_tensor(values, layout=torch.jagged)}
    return ppo_loss(ACTOR, output, rows)


def plain(data: Any) -> float:
    """How far advantages without hints and pairs are from those of verl's own GRPO, where a group votes."""
    batch = adapter.training_batch(data)
    ours = advantages(batch).batch["advantages"].clone()
    theirs = compute_advantage(batch, core_algos.AdvantageEstimator.GRPO, config=AlgoConfig())
    votes = np.array(["/" not in name for name in batch.non_tensor_batch["uid"]])
    tokens = batch.batch["response_mask"]
    scale = tokens.sum() / tokens[votes].sum()
    return float((ours / scale - theirs.batch["advantages"])[votes].abs().max())


def vanilla(data: Any) -> float:
    """How far the loss is from verl's own off-policy, with ratios below its second clip."""
    generator = torch.Generator().manual_seed(0)
    mask = data.batch["response_mask"]
    old = -torch.rand(mask.shape, generator=generator)
    new = old + 0.5 * (torch.rand(mask.shape, generator=generator) - 0.5)
    signal = torch.randn(mask.shape, generator=generator)
    losses = [
        core_algos.get_policy_loss_fn(name)(old, new, signal, mask, "token-mean", ACTOR)[0]
        for name in ("vanilla", "hintloop")
    ]
    return float((losses[0] - losses[1]).abs())


def masked(step: Any) -> list[float]:
    """The largest gradient at a token off the mask and on it, with nothing but NaN off the mask."""
    batch, mask = step.batch, step.batch["response_mask"].bool()
    old = batch["old_log_probs"].where(mask, torch.nan)
    new = (old + 0.1).requires_grad_()
    loss, _ = adapter.policy_loss(old, new, batch["advantages"], batch["response_mask"], config=ACTOR)
    loss.backward()
    return [float(new.grad[~mask].abs().max()), float(new.grad[mask].abs().max())]


def moved(data: Any, teacher: Any) -> list[int]:
    """Advantages that a hint moves off the compared tokens, and on them."""
    hints = adapter.hint_contexts(data)
    with torch.no_grad():
        batches = [
            adapter.training_batch(data, hint_log_probs=given) for given in (None, log_probs(teacher, hints))
        ]
    difference = advantages(batches[0]).batch["advantages"] != advantages(batches[1]).batch["advantages"]
    compared = torch.zeros_like(difference)
    for row, slot, column in data.batch["hint_response_mask"].nonzero().tolist():
        compared[row, data.batch["hint_start"][row, slot] + column] = True
    return [int((difference & ~compared).sum()), int((difference & compared).sum())]


def aligned(data: Any) -> bool:
    """Compared tokens are the same in the row and behind the hint, also when verl has mixed the rows."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
    data = data.select_idxs(order)
    batch, width = data.batch, data.batch["prompts"].shape[1]
    entries = batch["hint_response_mask"].nonzero().tolist()
    return all(
        batch["hint_input_ids"][row, slot, width + column]
        == batch["responses"][row, batch["hint_start"][row, slot] + column]
        for row, slot, column in entries
    )


def refusals(data: Any) -> list[str]:
    found = []
    for call in (
        lambda: adapter.to_dataproto([]),
        lambda: adapter.training_batch(data, pair_log_probs=torch.zeros(2, 2)),
    ):
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
