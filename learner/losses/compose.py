"""The whole recipe as one function: imitation, hint distillation and preferences on one batch of any causal LM.

It shows and checks what is trained, without a trainer: every sequence's logits are dense (B x T x V), so it is for
short batches. In the training loop the first channel is a policy loss with advantages instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from hintloop.learner.losses.divergence import generalized_jsd, require_settings
from hintloop.learner.losses.entropy import entropy_aware_opd, entropy_gated_mixture
from hintloop.learner.losses.loss_batch import Hinted, LossBatch, Pairs, Rows
from hintloop.learner.losses.preference import dpo, simpo
from hintloop.learner.losses.reduction import full_precision
from hintloop.learner.losses.sdpo import token_logprobs
from hintloop.learner.losses.taid import taid

PreferenceName = Literal["dpo", "simpo"]
Wrapper = Literal["none", "taid", "entropy_opd", "entropy_gated"]


@dataclass(frozen=True, slots=True, eq=False)
class LossComponents:
    """Scalars in nats, unweighted but for ``total``. None: the channel is absent or off, which is not a loss of 0."""

    lm_ce: Tensor | None
    sdpo_jsd: Tensor | None
    trace_replay_dpo: Tensor | None
    total: Tensor

    def detached(self) -> LossComponents:
        """The same numbers as tensors without a graph, on their device: nothing waits for an accelerator."""
        values = (getattr(self, field.name) for field in fields(self))
        return LossComponents(*(None if v is None else v.detach() for v in values))  # type: ignore[arg-type]


def compose_loss(
    model: Any,
    batch: LossBatch,
    *,
    alpha_sdpo: float,
    beta_replay: float,
    jsd_beta: float = 0.5,
    temperature: float = 1.0,
    dpo_beta: float = 0.1,
    dpo_variant: PreferenceName = "dpo",
    simpo_gamma: float = 0.5,
    sdpo_wrapper: Wrapper = "none",
    taid_t: float | None = None,
    teacher: Any = None,
    reference: Any = None,
) -> LossComponents:
    """``lm_ce + alpha_sdpo * sdpo_jsd + beta_replay * trace_replay_dpo`` over the channels that ``batch`` holds.

    ``model`` is a Hugging Face causal language model: called with ``input_ids`` and ``attention_mask``, it returns
    ``logits`` (B, T, V). The token at p is predicted at p - 1 of its own sequence, in every channel.

    - ``lm_ce``: mean cross-entropy of the rollout's trained tokens.
    - ``sdpo_jsd``: mean over the K tokens of what ``sdpo_wrapper`` makes of student and teacher logits divided by
      ``temperature``: "none" is ``generalized_jsd`` with ``jsd_beta`` (read by this one only), "taid" needs
      ``taid_t`` in [0, 1], "entropy_opd" is ``entropy_aware_opd`` with at most its 16 entries, "entropy_gated" is
      ``entropy_gated_mixture``. The teacher is ``teacher``, or the model itself; it runs in eval mode without
      gradient, and its modules' modes are restored.
    - ``trace_replay_dpo``: mean over the P pairs of ``dpo`` on summed, or ``simpo`` on mean log-probabilities.
      "dpo" takes the reference from the model ``reference`` or from the batch, never both; "simpo" has none.

    With a hint that changes nothing, "none" and "entropy_gated" are 0 and "taid" is the student's entropy, all
    without a gradient; "entropy_opd" is 0, and its truncated sum still has a gradient. A weight of 0 switches
    its channel off, and nothing is computed for it. Sources: those of the functions named.

    ``ValueError`` for unknown names, weights that are negative or infinite, a ``taid_t`` that is missing, out of
    range or not used, index pairs out of range or of different tokens, a reference with no owner or two, a batch
    of which nothing is left to train, and what the functions named refuse.
    """
    _require_choices(dpo_variant, sdpo_wrapper, taid_t)
    require_settings(jsd_beta, temperature)
    for name, weight in (("alpha_sdpo", alpha_sdpo), ("beta_replay", beta_replay)):
        if not 0.0 <= weight < math.inf:
            raise ValueError(f"{name} must be finite and not negative, not {weight}")
    lm_ce = sdpo_jsd = preference = None
    if batch.rollout is not None:
        logits = _logits(model, batch.rollout)
        lm_ce = _imitation(logits, batch.rollout)
        if batch.hinted is not None and alpha_sdpo:
            owner = model if teacher is None else teacher
            student, target, tokens = _aligned(logits, batch.rollout, batch.hinted, owner)
            student, target = full_precision(student) / temperature, full_precision(target) / temperature
            old = batch.hinted.old_logprobs
            sdpo_jsd = _distillation(student, target, tokens, old, sdpo_wrapper, jsd_beta, taid_t)
    if batch.pairs is not None and beta_replay:
        preference = _preference(model, batch.pairs, reference, dpo_variant, dpo_beta, simpo_gamma)
    weighted = ((1.0, lm_ce), (alpha_sdpo, sdpo_jsd), (beta_replay, preference))
    terms = [weight * loss for weight, loss in weighted if loss is not None]
    if not terms:
        raise ValueError("nothing to train: every channel is absent from the batch or has weight 0")
    return LossComponents(lm_ce, sdpo_jsd, preference, torch.stack(terms).sum())


def with_reference(batch: LossBatch, model: Any) -> LossBatch:
    """``batch`` with the log-probabilities of its pairs under ``model`` as it is now, for the variant "dpo".

    ``ValueError`` for a batch without pairs, or with a reference already.
    """
    if batch.pairs is None or batch.pairs.reference is not None:
        raise ValueError("need a batch with pairs that have no reference yet")
    return replace(batch, pairs=replace(batch.pairs, reference=_reference(model, batch.pairs.rows)))


def _logits(model: Any, rows: Rows) -> Tensor:
    logits: Tensor = model(input_ids=rows.ids, attention_mask=rows.attended.long(), use_cache=False).logits
    if logits.shape[:2] != rows.ids.shape:
        raise ValueError(f"need logits (B, T, V) for ids {tuple(rows.ids.shape)}, not {tuple(logits.shape)}")
    return logits


def _imitation(logits: Tensor, rows: Rows) -> Tensor | None:
    """None where the rollout has no trained tokens: it is a context of the hint channel then, and no channel."""
    trained = rows.trained[:, 1:]
    if not bool(trained.any()):
        return None
    return F.cross_entropy(full_precision(logits[:, :-1][trained]), rows.ids[:, 1:][trained])


def _aligned(logits: Tensor, rollout: Rows, hinted: Hinted, teacher: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Student and teacher logits (K, V) of the same K tokens, and these tokens (K,)."""
    tokens = _tokens(rollout, hinted.student_at, "student_at")
    same = tokens == _tokens(hinted.teacher, hinted.teacher_at, "teacher_at")
    if not bool(same.all()):
        first = int((~same).nonzero()[0])
        raise ValueError(
            f"{int((~same).sum())} of {len(same)} index pairs are of different tokens, first {first}"
        )
    with _frozen(teacher):
        target = _logits(teacher, hinted.teacher)
    return _predicting(logits, hinted.student_at), _predicting(target, hinted.teacher_at), tokens


def _tokens(rows: Rows, at: Tensor, name: str) -> Tensor:
    row, position = at.unbind(-1)
    batch, length = rows.ids.shape
    if bool(((row < 0) | (row >= batch) | (position < 1) | (position >= length)).any()):
        raise ValueError(f"{name} must have rows in [0, {batch}) and positions in [1, {length})")
    if not bool(rows.attended[row, position].all()):
        raise ValueError(f"{name} has positions in the padding")
    return rows.ids[row, position]


def _predicting(logits: Tensor, at: Tensor) -> Tensor:
    return logits[at[:, 0], at[:, 1] - 1]


def _distillation(
    student: Tensor,
    teacher: Tensor,
    tokens: Tensor,
    old: Tensor | None,
    wrapper: Wrapper,
    jsd_beta: float,
    t: float | None,
) -> Tensor:
    all_of_them = torch.ones_like(tokens, dtype=torch.bool)
    if wrapper == "taid" and t is not None:
        return taid(student, teacher, t=t, mask=all_of_them)
    if wrapper == "entropy_gated":
        return entropy_gated_mixture(student, teacher, mask=all_of_them)
    if wrapper == "entropy_opd":
        old = token_logprobs(student.detach(), tokens) if old is None else old
        k = min(16, student.shape[-1])
        return entropy_aware_opd(student, teacher, tokens, old, mask=all_of_them, k=k).loss
    return generalized_jsd(student, teacher, beta=jsd_beta, mask=all_of_them, reduction="mean")


def _preference(
    model: Any, pairs: Pairs, reference: Any, variant: PreferenceName, beta: float, gamma: float
) -> Tensor:
    if variant == "simpo":
        if reference is not None:
            raise ValueError("'simpo' has no reference model, and one is given")
        means = _summed(model, pairs.rows) / pairs.rows.trained.sum(-1)
        return simpo(*means.chunk(2), beta=beta, gamma=gamma).losses.mean()
    if (reference is None) == (pairs.reference is None):
        owners = "none" if reference is None else "both"
        raise ValueError(
            f"'dpo' needs a reference model or reference log-probabilities in the batch, not {owners}"
        )
    sums = _reference(reference, pairs.rows) if pairs.reference is None else pairs.reference
    return dpo(*_summed(model, pairs.rows).chunk(2), *sums.chunk(2), beta=beta).losses.mean()


def _reference(model: Any, rows: Rows) -> Tensor:
    with _frozen(model):
        return _summed(model, rows)


def _summed(model: Any, rows: Rows) -> Tensor:
    """Summed log-probabilities (B,) of the trained tokens."""
    logits, trained = _logits(model, rows), rows.trained[:, 1:]
    logps = token_logprobs(logits[:, :-1][trained], rows.ids[:, 1:][trained])
    return logps.new_zeros(len(rows.ids)).index_add(0, trained.nonzero()[:, 0], logps)


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """Eval mode without gradient; afterwards each module is in its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _require_choices(variant: str, wrapper: str, t: float | None) -> None:
    if variant not in get_args(PreferenceName):
        raise ValueError(f"dpo_variant must be one of {get_args(PreferenceName)}, not {variant!r}")
    if wrapper not in get_args(Wrapper):
        raise ValueError(f"sdpo_wrapper must be one of {get_args(Wrapper)}, not {wrapper!r}")
    if (t is None) == (wrapper == "taid"):
        raise ValueError(f"taid_t is for the wrapper 'taid', which needs it: not {t} with {wrapper!r}")
    if t is not None and not 0.0 <= t <= 1.0:
        raise ValueError(f"taid_t must be in [0, 1], not {t}")
