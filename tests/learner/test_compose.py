"""The recipe as one function, against the pure losses it is made of; and its example."""

from __future__ import annotations

import itertools
import math
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from hintloop.learner.losses.compose import (
    Hinted,
    LossBatch,
    LossComponents,
    Pairs,
    Rows,
    compose_loss,
    with_reference,
)
from hintloop.learner.losses.divergence import generalized_jsd
from hintloop.learner.losses.entropy import entropy_aware_opd, entropy_gated_mixture
from hintloop.learner.losses.example_batch import build_batch
from hintloop.learner.losses.preference import avg_sequence_logprob, dpo, simpo
from hintloop.learner.losses.taid import taid

from .factory import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
STUDENT = ROOT / "agent" / "student" / "student-tiny"
WRAPPERS = ("none", "taid", "entropy_opd", "entropy_gated")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m['role'] }}]{{ m['content'] }}<|im_end|>{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(STUDENT)


@pytest.fixture
def model() -> Any:
    return tiny_model(vocabulary=960)


@pytest.fixture
def batch(tokenizer: Any, model: Any) -> LossBatch:
    return with_reference(build_batch(tokenizer), tiny_model(seed=1, vocabulary=960))


def loss(model: Any, batch: LossBatch, **options: Any) -> LossComponents:
    return compose_loss(model, batch, **{"alpha_sdpo": 0.5, "beta_replay": 0.25, **options})


def t_of(wrapper: str) -> float | None:
    return 0.6 if wrapper == "taid" else None


def dense(model: Any, rows: Rows) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(input_ids=rows.ids, attention_mask=rows.attended.long()).logits
    return result


@pytest.mark.parametrize(("variant", "wrapper"), [*itertools.product(("dpo", "simpo"), WRAPPERS)])
def test_every_combination_is_finite_and_trains(
    model: Any, batch: LossBatch, variant: str, wrapper: str
) -> None:
    losses = loss(model, batch, dpo_variant=variant, sdpo_wrapper=wrapper, taid_t=t_of(wrapper))
    losses.total.backward()
    assert losses.lm_ce is not None
    assert losses.sdpo_jsd is not None
    assert losses.trace_replay_dpo is not None
    expected = losses.lm_ce + 0.5 * losses.sdpo_jsd + 0.25 * losses.trace_replay_dpo
    assert float(losses.total.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    assert math.isfinite(float(losses.total.detach()))
    norms = [p.grad.norm() for p in model.parameters()]
    assert all(bool(n.isfinite()) for n in norms)
    assert sum(float(n) for n in norms) > 0.0


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_distillation_is_the_pure_loss_of_the_states_before_the_tokens(
    model: Any, batch: LossBatch, wrapper: str
) -> None:
    assert batch.rollout is not None
    assert batch.hinted is not None
    s_at, t_at = batch.hinted.student_at, batch.hinted.teacher_at
    student = dense(model, batch.rollout)[0, s_at[0, 1] - 1 : s_at[-1, 1]] / 1.3
    teacher = dense(model, batch.hinted.teacher)[0, t_at[0, 1] - 1 : t_at[-1, 1]] / 1.3
    tokens = batch.rollout.ids[0, s_at[:, 1]]
    mask = torch.ones(len(tokens), dtype=torch.bool)
    old = student.log_softmax(-1)[range(len(tokens)), tokens]
    expected = {
        "none": lambda: generalized_jsd(student, teacher, beta=0.3, mask=mask, reduction="mean"),
        "taid": lambda: taid(student, teacher, t=0.6, mask=mask),
        "entropy_opd": lambda: entropy_aware_opd(student, teacher, tokens, old, mask=mask).loss,
        "entropy_gated": lambda: entropy_gated_mixture(student, teacher, mask=mask),
    }[wrapper]()
    got = loss(model, batch, jsd_beta=0.3, temperature=1.3, sdpo_wrapper=wrapper, taid_t=t_of(wrapper))
    assert got.sdpo_jsd is not None
    assert float(got.sdpo_jsd.detach()) == pytest.approx(float(expected), abs=1e-6)


def test_imitation_and_preferences_are_the_pure_losses_of_dense_logits(model: Any, batch: LossBatch) -> None:
    assert batch.rollout is not None
    assert batch.pairs is not None
    assert batch.pairs.reference is not None
    rows, rollout = batch.pairs.rows, batch.rollout
    means = avg_sequence_logprob(dense(model, rows), rows.ids, rows.trained)
    sums = means * rows.trained.sum(-1)
    by_dpo, by_simpo = loss(model, batch).detached(), loss(model, batch, dpo_variant="simpo").detached()
    ce = -avg_sequence_logprob(dense(model, rollout), rollout.ids, rollout.trained)
    expected = dpo(sums[:1], sums[1:], batch.pairs.reference[:1], batch.pairs.reference[1:], beta=0.1).losses
    torch.testing.assert_close(by_dpo.lm_ce, ce[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(by_dpo.trace_replay_dpo, expected[0], atol=1e-5, rtol=1e-6)
    alone = simpo(means[:1], means[1:], beta=0.1, gamma=0.5).losses
    torch.testing.assert_close(by_simpo.trace_replay_dpo, alone[0], atol=1e-6, rtol=1e-6)


def test_dpo_of_a_model_with_itself_is_ln_2_from_either_owner(model: Any, tokenizer: Any) -> None:
    bare = build_batch(tokenizer)
    for losses in (loss(model, bare, reference=model), loss(model, with_reference(bare, model))):
        assert losses.trace_replay_dpo is not None
        assert float(losses.trace_replay_dpo.detach()) == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.parametrize("wrapper", ["none", "entropy_opd", "entropy_gated"])
def test_a_null_hint_teaches_nothing(model: Any, batch: LossBatch, wrapper: str) -> None:
    assert batch.rollout is not None
    assert batch.hinted is not None
    null = replace(batch.hinted, teacher=batch.rollout, teacher_at=batch.hinted.student_at)
    losses = loss(model, LossBatch(batch.rollout, null), sdpo_wrapper=wrapper)
    assert losses.sdpo_jsd is not None
    assert float(losses.sdpo_jsd.detach()) == pytest.approx(0.0, abs=1e-6)
    losses.sdpo_jsd.backward()
    if wrapper != "entropy_opd":  # its truncated sum is 0 there and has a slope
        assert all(float(p.grad.abs().max()) < 1e-5 for p in model.parameters())


def test_channels_that_are_absent_or_off_are_none(model: Any, batch: LossBatch) -> None:
    off = loss(model, batch, alpha_sdpo=0.0, beta_replay=0.0)
    assert (off.sdpo_jsd, off.trace_replay_dpo) == (None, None)
    assert off.lm_ce is not None
    assert torch.equal(off.total, off.lm_ce)
    absent = loss(model, LossBatch(batch.rollout))
    assert (absent.sdpo_jsd, absent.trace_replay_dpo) == (None, None)
    pairs_only = loss(model, LossBatch(pairs=batch.pairs))
    assert (pairs_only.lm_ce, pairs_only.sdpo_jsd) == (None, None)
    assert off.detached().sdpo_jsd is None
    assert not off.detached().total.requires_grad
    with pytest.raises(ValueError, match="nothing to train"):
        loss(model, LossBatch(pairs=batch.pairs), beta_replay=0.0)


class _ByPosition(nn.Module):
    """Its logits at p are row p of a table, whatever the tokens are."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(400, vocabulary, generator=torch.Generator().manual_seed(0)))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool = False) -> SimpleNamespace:
        rows, length = input_ids.shape
        return SimpleNamespace(logits=self.table[:length].expand(rows, -1, -1))


def test_only_the_states_before_the_target_tokens_learn(batch: LossBatch) -> None:
    assert batch.rollout is not None
    assert batch.hinted is not None
    model, at = _ByPosition(960), batch.hinted.student_at[:, 1]
    losses = loss(model, batch)
    assert losses.sdpo_jsd is not None
    expected = generalized_jsd(
        model.table[at - 1], model.table[batch.hinted.teacher_at[:, 1] - 1], beta=0.5
    ).mean()
    torch.testing.assert_close(losses.sdpo_jsd, expected)
    (gradient,) = torch.autograd.grad(losses.sdpo_jsd, model.table, retain_graph=True)
    assert gradient.abs().sum(-1).nonzero().flatten().tolist() == (at - 1).tolist()
    assert losses.lm_ce is not None
    (gradient,) = torch.autograd.grad(losses.lm_ce, model.table)
    trained = batch.rollout.trained[0].nonzero().flatten()
    assert gradient.abs().sum(-1).nonzero().flatten().tolist() == (trained - 1).tolist()


def test_the_teacher_gets_no_gradient_and_its_modes_back(model: Any, batch: LossBatch) -> None:
    teacher = tiny_model(seed=2, vocabulary=960)
    seen: list[bool] = []
    for each in (model, teacher):
        each.train()
        each.model.layers[0].eval()
        each.register_forward_pre_hook(lambda module, args: seen.append(module.training))
    loss(model, batch, teacher=teacher).total.backward()
    assert seen == [True, False, True]  # student, teacher, pairs
    assert all(p.grad is None for p in teacher.parameters())
    loss(model, batch)
    assert seen[3:] == [True, False, True]
    for each in (model, teacher):
        assert each.training
        assert not each.model.layers[0].training


def test_steps_lower_the_total(model: Any, batch: LossBatch) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = loss(model, batch)
    before.total.backward()
    optimizer.step()
    assert float(loss(model, batch).detached().total) < float(before.detached().total)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dpo_variant": "ipo"}, "dpo_variant must be one of"),
        ({"sdpo_wrapper": "eopd"}, "sdpo_wrapper must be one of"),
        ({"sdpo_wrapper": "taid"}, "taid_t is for the wrapper 'taid'"),
        ({"taid_t": 0.5}, "taid_t is for the wrapper 'taid'"),
        ({"sdpo_wrapper": "taid", "taid_t": 1.5}, r"taid_t must be in \[0, 1\], not 1.5"),
        ({"alpha_sdpo": -1.0}, "alpha_sdpo must be finite"),
        ({"beta_replay": math.nan}, "beta_replay must be finite"),
        ({"temperature": 0.0}, "temperature"),
        ({"jsd_beta": 2.0}, "beta must be in"),
        ({"reference": "model"}, "not both"),
        ({"reference": "model", "dpo_variant": "simpo"}, "'simpo' has no reference"),
    ],
)
def test_settings_without_a_meaning_are_refused(
    model: Any, batch: LossBatch, options: dict[str, Any], message: str
) -> None:
    if "reference" in options:
        options = {**options, "reference": model}
    with pytest.raises(ValueError, match=message):
        loss(model, batch, **options)


def test_batches_that_do_not_fit_are_refused(model: Any, batch: LossBatch, tokenizer: Any) -> None:
    assert batch.rollout is not None
    assert batch.hinted is not None
    assert batch.pairs is not None
    rollout, hinted, rows = batch.rollout, batch.hinted, batch.pairs.rows
    with pytest.raises(ValueError, match="not none"):
        loss(model, build_batch(tokenizer))
    with pytest.raises(ValueError, match="index pairs are of different tokens"):
        loss(model, LossBatch(rollout, replace(hinted, teacher_at=hinted.teacher_at - torch.tensor([0, 1]))))
    with pytest.raises(ValueError, match="positions in"):
        loss(model, LossBatch(rollout, replace(hinted, student_at=hinted.student_at + 10_000)))
    with pytest.raises(ValueError, match="two logits of one shape"):
        loss(model, batch, teacher=_ByPosition(7))
    with pytest.raises(ValueError, match=r"trained must be a tensor of torch.bool, not NoneType"):
        replace(rollout, trained=None)
    with pytest.raises(ValueError, match=r"attended must be a tensor of torch.bool, not torch.int64"):
        replace(rollout, attended=rollout.ids)
    with pytest.raises(ValueError, match="trained must be of shape"):
        replace(rollout, trained=rollout.trained[:, :-1])
    with pytest.raises(ValueError, match="must be attended"):
        replace(rollout, attended=~rollout.trained)
    with pytest.raises(ValueError, match="as many chosen as rejected"):
        Pairs(Rows(rows.ids[:1], rows.attended[:1], rows.trained[:1]))
    with pytest.raises(ValueError, match="has no tokens"):
        Pairs(replace(rows, trained=torch.zeros_like(rows.trained)))
    with pytest.raises(ValueError, match="reference must be of shape"):
        Pairs(rows, torch.zeros(3))
    with pytest.raises(ValueError, match="no token"):
        Hinted(rollout, torch.zeros(0, 2).long(), torch.zeros(0, 2).long())
    with pytest.raises(ValueError, match="needs the rollout"):
        LossBatch(hinted=hinted)
    with pytest.raises(ValueError, match="no reference yet"):
        with_reference(batch, model)


@pytest.mark.parametrize("template", [None, CHATML, ALTERNATING])
@pytest.mark.parametrize("variant", ["factorial", "binary_search"])
def test_the_hint_stands_before_the_failing_turn_and_fires(variant: Any, template: str | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(STUDENT)
    tokenizer.chat_template = template
    batch = build_batch(tokenizer, variant)
    assert batch.rollout is not None
    assert batch.hinted is not None
    assert batch.pairs is not None
    ids, taught = batch.rollout.ids[0], batch.hinted.teacher.ids[0]
    start, end = int(batch.hinted.student_at[0, 1]), int(batch.hinted.student_at[-1, 1]) + 1
    extra = int(batch.hinted.teacher_at[0, 1]) - start
    at = int((ids[:start] != taught[:start]).nonzero()[0])
    # ids around the hint are the rollout's own, to the last one (a token in common may move the seam)
    assert extra > 0
    assert torch.equal(taught[: start + extra][at + extra :], ids[at:start])
    assert torch.equal(taught[start + extra :], ids[start:end])
    assert "Hint: main.py holds" in tokenizer.decode(taught[: start + extra])
    failing = tokenizer.decode(ids[start:end])
    assert failing.startswith("<tool_call>\n")
    assert failing.endswith("</tool_call><|im_end|>")
    assert torch.equal(batch.pairs.rows.ids[1, start:end], ids[start:end])
    losses = loss(tiny_model(vocabulary=960), batch, dpo_variant="simpo")
    assert losses.sdpo_jsd is not None
    assert float(losses.sdpo_jsd.detach()) > 1e-6


def test_any_tokenizer_tells_the_story_but_not_an_unknown_one() -> None:
    batch = build_batch(tiny_tokenizer())
    assert math.isfinite(float(loss(tiny_model(), batch, dpo_variant="simpo").detached().total))
    with pytest.raises(ValueError, match="variant must be one of"):
        build_batch(tiny_tokenizer(), "sorting")  # type: ignore[arg-type]


def test_a_template_that_leaves_out_a_turn_is_refused(tokenizer: Any) -> None:
    other = AutoTokenizer.from_pretrained(STUDENT)
    other.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ValueError, match="leaves out a turn"):
        build_batch(other)


def test_the_example_lowers_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(ROOT / "examples" / "quickstart.py"))["main"]
    totals = main(["--steps", "3"])
    assert totals[-1] < totals[0]
    assert "trace_replay_dpo" in capsys.readouterr().out
