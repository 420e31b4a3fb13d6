"""verl: a policy loss and an advantage estimator under their names, and episodes as its ``DataProto``.

Importing this module registers both, which is how verl finds them: start it with
``VERL_USE_EXTERNAL_MODULES=hintloop.learner.adapters.verl``, and choose ``algorithm.adv_estimator=hintloop_grpo`` and
``actor_rollout_ref.actor.policy_loss.loss_mode=hintloop``. Its loss functions see log-probabilities, advantages and a
mask, so hints and pairs reach them as advantages per token, in the field ``reward_baselines``, which verl hands
to every registered estimator. Written for verl 0.9.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss

from hintloop.learner.adapters.samples import pair_weights
from hintloop.learner.adapters.verl_rows import NAMED, hint_contexts, pair_responses, to_dataproto
from hintloop.learner.rows import group_advantages

__all__ = [
    "advantage_estimator",
    "hint_contexts",
    "pair_responses",
    "policy_loss",
    "to_dataproto",
    "training_batch",
]

TRAINED = (*NAMED, "response_mask", "old_log_probs", "token_level_rewards", "reward_baselines")
"""What an update needs of it."""


def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)`` with r = pi / pi_old, (B, R) each, as verl aggregates it.

    The loss of ``learner.loss_type = "dapo"`` in the mode "token-mean"; ``config`` is verl's actor configuration,
    with ``clip_ratio_low`` and ``clip_ratio_high``. verl's own differs by a second clip where A is negative.
    Positions off the mask may hold anything. Registered as ``hintloop``.
    """
    mask = response_mask.bool()
    low, high = (
        config.clip_ratio if c is None else c for c in (config.clip_ratio_low, config.clip_ratio_high)
    )
    log_ratio = (log_prob - old_log_prob).where(mask, 0.0)
    ratio, advantages = log_ratio.exp(), advantages.where(mask, 0.0)
    plain, clipped = ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages
    losses = -torch.minimum(plain, clipped)
    losses = losses if rollout_is_weights is None else losses * rollout_is_weights.where(mask, 0.0)
    tokens = mask.sum().clamp(min=1)
    metrics = {
        "actor/pg_clipfrac": float((clipped < plain).sum() / tokens),
        "actor/ppo_kl": float(-log_ratio.detach().sum() / tokens),
    }
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), metrics


def advantage_estimator(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    config: Any = None,
    reward_baselines: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """(B, R) advantages, twice: those of the reward within its group, less ``reward_baselines`` (B, R).

    ``index`` (B,) names the group of each row. A row alone in its group has no vote. The others are scaled by the
    tokens of the batch over theirs, so that rows without a vote (pairs) do not dilute them under "token-mean".
    Registered as ``hintloop_grpo``.
    """
    rewards, names = token_level_rewards.sum(-1).tolist(), list(index)
    groups = [[row for row, name in enumerate(names) if name == group] for group in dict.fromkeys(names)]
    advantages = torch.zeros(
        len(names), 1, dtype=token_level_rewards.dtype, device=token_level_rewards.device
    )
    voting = [row for rows in groups if len(rows) > 1 for row in rows]
    for rows in groups:
        for row, advantage in zip(rows, group_advantages([rewards[row] for row in rows]), strict=True):
            advantages[row] = advantage or 0.0
    scale = response_mask.sum() / response_mask[voting].sum().clamp(min=1)
    signal = advantages * scale
    signal = (signal if reward_baselines is None else signal - reward_baselines) * response_mask
    return signal, signal


def training_batch(
    data: Any,
    *,
    hint_log_probs: Tensor | None = None,
    pair_log_probs: Tensor | None = None,
    pair_reference: Tensor | None = None,
    alpha_sdpo: float = 0.1,
    beta_replay: float = 0.1,
    dpo_beta: float = 0.1,
) -> Any:
    """The rows of an update: episodes, and behind them both sides of each pair; ready for the estimator.

    ``hint_log_probs`` (H, R) are the teacher's, of the responses of ``hint_contexts``; ``pair_log_probs`` and
    ``pair_reference`` (2 P, R) the policy's and the reference's, of ``pair_responses``. What is None is left out.
    The hint's advantage is ``log q - log pi_old`` of a compared token; each channel keeps its own denominator
    where verl takes the mean over the tokens of this batch ("token-mean", one mini-batch).
    ``ValueError`` for pairs with one of the two only.
    """
    if (pair_log_probs is None) != (pair_reference is None):
        raise ValueError("pairs need log-probabilities of the policy and of the reference, or neither")
    pairs = None if pair_log_probs is None else pair_responses(data)
    tokens = int(data.batch["response_mask"].sum())
    tokens += 0 if pairs is None else int(pairs.batch["response_mask"].sum())
    baselines = torch.zeros_like(data.batch["old_log_probs"])
    if hint_log_probs is not None:
        _add_hints(baselines, data.batch, hint_log_probs, alpha_sdpo * tokens)
    episodes = data.select(batch_keys=[name for name in TRAINED if name != "reward_baselines"])
    episodes.batch["reward_baselines"] = baselines
    if pairs is None or pair_log_probs is None or pair_reference is None:
        return episodes
    mask = pairs.batch["response_mask"]
    count = len(mask) // 2
    chosen, rejected = ((pair_log_probs - pair_reference) * mask).sum(-1).split(count)
    weights = torch.from_numpy(pair_weights((chosen - rejected).cpu().numpy(), dpo_beta)).to(baselines)
    signed = torch.cat([weights, -weights]) * (beta_replay * tokens / count)
    pairs.batch["old_log_probs"] = (pair_log_probs * mask).to(baselines)
    pairs.batch["token_level_rewards"] = torch.zeros_like(pairs.batch["old_log_probs"])
    pairs.batch["reward_baselines"] = -signed[:, None] * mask
    pairs.non_tensor_batch["uid"] = np.array([f"pair/{row}" for row in range(len(mask))], dtype=object)
    return DataProto.concat([episodes, pairs])


def _add_hints(baselines: Tensor, batch: Any, teacher: Tensor, scale: float) -> None:
    """Subtracts the hints' advantages, times ``scale`` over their number, from the baselines of their rows."""
    every = batch["hint_response_mask"].bool()
    there = every.any(-1)
    row, start = there.nonzero()[:, 0], batch["hint_start"][there]
    context, column = every[there].nonzero(as_tuple=True)
    at = row[context], start[context] + column
    gap = teacher[context, column].to(baselines) - batch["old_log_probs"][at]
    baselines.index_put_(at, -scale / max(1, len(gap)) * gap, accumulate=True)


register_policy_loss("hintloop")(policy_loss)
register_adv_est("hintloop_grpo")(advantage_estimator)
