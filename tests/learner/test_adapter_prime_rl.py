"""The loss for PRIME-RL: its published formulas, hints in its reference stream, and gradients equal to ours.

With ``HINTLOOP_PRIME_RL`` naming a clone of PRIME-RL, its own functions are compared, release by release.
"""

from __future__ import annotations
import __future__

import ast
import math
import os
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hintloop.learner.adapters.prime_rl import Formula, LossInputs, LossOutputs, loss_fn, training_samples
from hintloop.learner.adapters.samples import model_score
from hintloop.learner.models import no_progress_bar
from hintloop.replay.episode import Episode
from hintloop.replay.journal import Journal

from .channels import ALPHA, DPO_BETA, REPLAY, gradient, our_gradient, sampled_groups
from .factory import tiny_model
from .training import logps

EXAMPLE = Path(__file__).parents[2] / "examples" / "prime_rl"
RELEASES = ("v0.6.0", "v0.7.0", "v0.8.0", "559b447")
WANTED = {
    *("LossInputs", "LossOutputs", "_safe_mean", "compute_importance_ratio_and_mismatch_kl"),
    *("default_loss_fn", "ref_kl_loss_fn", "ce_loss_fn", "compute_loss"),
}


def inputs(rows: Sequence[tuple[float, float, float, float, bool]], **others: Any) -> LossInputs:
    """From rows of probability, probability when sampled, teacher's (0: no hint), advantage, mask."""
    now, old, teacher, advantages, mask = zip(*rows, strict=True)
    double = {"dtype": torch.float64}
    return LossInputs(
        trainer_logprobs=torch.tensor(now, **double).log().requires_grad_(),
        inference_logprobs=torch.tensor(old, **double).log(),
        ref_logprobs=torch.tensor([math.log(q) if q else 0.0 for q in teacher], **double),
        advantages=torch.tensor(advantages, **double),
        loss_mask=torch.tensor(mask),
        **others,
    )


def restated(
    rows: Sequence[tuple[float, float, float, float, bool]], formula: Formula, *, alpha: float
) -> float:
    """The loss with the default thresholds, token by token."""
    loss = 0.0
    for now, old, teacher, advantage, trained in rows:
        if not trained:
            continue
        ratio, moved = now / old, now - old
        inside = -0.2 <= moved <= 0.2
        keep = inside if formula == "v0.5" else moved <= 0.2 if advantage > 0 else moved >= -0.2
        keep_hint = inside if formula == "v0.5" else moved >= -0.2
        gap = math.log(teacher / now) if teacher else 0.0
        loss += -(keep * advantage + keep_hint * alpha * gap) * ratio + 1e-3 * math.log(ratio) ** 2
    return loss


def test_values_are_those_computed_by_hand() -> None:
    rows = [
        (0.50, 0.40, 0.00, 2.0, True),  # kept: -2 * 1.25
        (0.75, 0.25, 0.00, 1.0, True),  # rose by 0.5: dropped
        (0.75, 0.25, 0.00, -1.0, True),  # rose with A < 0: kept since 0.6, dropped before
        (0.25, 0.50, 0.125, 0.0, True),  # fell by 0.25: no hint term either
        (0.20, 0.20, 0.80, 0.0, True),  # a hint alone: -0.5 ln 4
        (0.90, 0.10, 0.50, 5.0, False),
    ]
    drift = 1e-3 * (math.log(1.25) ** 2 + 2 * math.log(3.0) ** 2 + math.log(2.0) ** 2)
    hint = -0.5 * math.log(4.0)
    for formula, policy in (("current", -2.5 + 3.0), ("v0.5", -2.5)):
        result = loss_fn(inputs(rows), formula=formula, alpha_sdpo=0.5)
        assert float(result.loss.detach()) == pytest.approx(policy + hint + drift, abs=1e-8)
        assert result.metrics["hint/tokens"] == 2
    assert result.metrics["is_masked"] == pytest.approx(3 / 5)


PROBABILITY = st.floats(1e-3, 1.0)
ROW = st.tuples(
    PROBABILITY, PROBABILITY, st.just(0.0) | st.floats(1e-3, 0.999), st.floats(-3, 3), st.booleans()
)


@given(st.lists(ROW, min_size=1, max_size=12), st.sampled_from(["current", "v0.5"]), st.floats(0, 2))
def test_loss_is_the_restated_formula(rows: list[Any], formula: Formula, alpha: float) -> None:
    result = loss_fn(inputs(rows), formula=formula, alpha_sdpo=alpha)
    assert float(result.loss.detach()) == pytest.approx(
        restated(rows, formula, alpha=alpha), abs=1e-8, rel=1e-8
    )


@given(st.lists(ROW, min_size=1, max_size=12), st.sampled_from(["current", "v0.5"]))
def test_without_a_hint_the_loss_is_the_plain_one(rows: list[Any], formula: Formula) -> None:
    bare = inputs([(*row[:2], 0.0, *row[3:]) for row in rows])
    none = inputs(rows)
    none.ref_logprobs = None
    losses = [
        loss_fn(given, formula=formula, alpha_sdpo=alpha).loss
        for given, alpha in ((bare, 0.7), (none, 0.7), (inputs(rows), 0.0))
    ]
    assert torch.equal(losses[0], losses[1])
    assert torch.allclose(losses[0], losses[2], rtol=0, atol=1e-12)


def test_untrained_tokens_have_no_gradient_and_are_never_read() -> None:
    given = inputs([(0.5, 0.4, 0.9, 1.0, True), (0.5, 0.4, 0.9, 1.0, False)])
    for stream in (given.inference_logprobs, given.ref_logprobs, given.advantages):
        assert stream is not None
        stream[1] = math.nan
    loss_fn(given).loss.backward()
    assert given.trainer_logprobs.grad is not None
    assert given.trainer_logprobs.grad[0] != 0
    assert given.trainer_logprobs.grad[1] == 0


def test_weights_multiply_each_token() -> None:
    rows = [(0.5, 0.4, 0.9, 1.0, True), (0.3, 0.4, 0.0, -1.0, True)]
    apart = [loss_fn(inputs([row])).loss for row in rows]
    weighted = loss_fn(inputs(rows, loss_weights=torch.tensor([2.0, 0.5], dtype=torch.float64))).loss
    assert torch.allclose(weighted, 2.0 * apart[0] + 0.5 * apart[1], rtol=0, atol=1e-12)


def test_an_empty_sequence_has_loss_0_with_a_graph() -> None:
    given = inputs([(0.5, 0.4, 0.9, 1.0, False)])
    loss = loss_fn(given).loss
    loss.backward()
    assert loss == 0
    assert given.trainer_logprobs.grad is not None


def test_streams_of_older_releases_are_read_by_their_names() -> None:
    rows = [(0.5, 0.4, 0.9, 1.0, True)]
    named = {k: v for k, v in vars(inputs(rows)).items() if k not in ("ref_logprobs", "loss_weights")}
    older = SimpleNamespace(**named, teacher_logprobs=inputs(rows).ref_logprobs)
    result = loss_fn(older)
    assert torch.equal(result.loss, loss_fn(inputs(rows)).loss)
    assert isinstance(result, LossOutputs)


def test_an_unknown_formula_is_refused() -> None:
    with pytest.raises(ValueError, match="formula must be one of"):
        loss_fn(inputs([(0.5, 0.4, 0.9, 1.0, True)]), formula="v0.9")  # type: ignore[arg-type]


def test_pairs_need_both_scores() -> None:
    with pytest.raises(ValueError, match="or neither"):
        training_samples([], policy=model_score(tiny_model()))


@dataclass
class Batch:
    """On-policy groups, and the gradient that our own channels have on them."""

    groups: list[list[Episode]]
    ours: torch.Tensor
    hint_tokens: int
    samples: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    groups = sampled_groups(tiny_model())
    ours = our_gradient(
        groups,
        tmp_path_factory.mktemp("ours"),
        model=tiny_model(),
        teacher=tiny_model(1),
        reference=tiny_model(2),
    )
    compared = sum(site.end - site.start for g in groups for e in g for site in e.hint_sites)
    return Batch(groups, ours, compared)


def samples_for(batch: Batch, **options: Any) -> list[dict[str, Any]]:
    scores = {
        name: model_score(tiny_model(seed))
        for name, seed in (("teacher", 1), ("policy", 0), ("reference", 2))
    }
    return training_samples(batch.groups, beta_replay=REPLAY, dpo_beta=DPO_BETA, **scores, **options)


def columns(sample: dict[str, Any], model: Any) -> dict[str, Any]:
    """A sample as what the loss is given."""
    found = torch.cat([torch.zeros(1, dtype=torch.float64), logps(model, sample["token_ids"])])
    reference = sample.get("ref_logprobs")
    return {
        "trainer_logprobs": found,
        "inference_logprobs": torch.tensor(sample["logprobs"]).double(),
        "ref_logprobs": None if reference is None else torch.tensor(reference).double(),
        "advantages": torch.tensor(sample["advantages"]).double(),
        "loss_mask": torch.tensor(sample["mask"]),
    }


@pytest.mark.parametrize("formula", ["current", "v0.5"])
def test_on_policy_gradient_of_all_channels_is_ours(batch: Batch, formula: Formula) -> None:
    samples = samples_for(batch)
    tokens = sum(map(sum, (s["mask"] for s in samples)))
    model = tiny_model()
    alpha = ALPHA * tokens / batch.hint_tokens  # their hint term is divided by all tokens of the step
    losses = [
        loss_fn(LossInputs(**columns(sample, model)), formula=formula, alpha_sdpo=alpha).loss
        for sample in samples
    ]
    (torch.stack(losses).sum() / tokens).backward()
    error = (gradient(model) - batch.ours).norm() / batch.ours.norm()
    assert error < 1e-6


def test_samples_leave_out_what_was_not_asked_for(batch: Batch) -> None:
    plain = training_samples(batch.groups)
    assert all("ref_logprobs" not in sample for sample in plain)
    assert len(plain) == len([e for g in batch.groups for e in g if g[0].group_id != "3" or e.hint_sites])
    hinted = samples_for(batch, ref_kl_weight=ALPHA)
    weights = [w for s in hinted for w in s.get("ref_kl_weights", [])]
    assert sum(w != 0 for w in weights) == batch.hint_tokens
    for sample in hinted:
        lengths = {len(v) for v in sample.values() if isinstance(v, list)}
        assert lengths == {len(sample["token_ids"])}


def test_the_example_trains_on_a_recorded_run(batch: Batch, tmp_path: Path) -> None:
    Journal(tmp_path / "journal").writer("w").append([e for group in batch.groups[:2] for e in group])
    tiny_model().save_pretrained(tmp_path / "student")
    main = runpy.run_path(str(EXAMPLE / "step.py"))["main"]
    with no_progress_bar():
        losses = main([str(tmp_path), "--steps", "2", "--lr", "1e-3"])
    assert losses[1] < losses[0]


def test_the_example_configuration_names_the_loss_and_its_settings() -> None:
    loss = tomllib.loads((EXAMPLE / "trainer.toml").read_text())["trainer"]["loss"]
    module, _, name = loss["import_path"].rpartition(".")
    assert getattr(import_module(module), name) is loss_fn
    assert set(loss["kwargs"]) == set(signature(loss_fn).parameters) - {"inputs"}


@pytest.fixture(scope="module")
def clone() -> Path:
    folder = os.environ.get("HINTLOOP_PRIME_RL")
    if folder is None:
        pytest.skip("HINTLOOP_PRIME_RL names no clone of PRIME-RL")
    return Path(folder)


@pytest.fixture
def theirs(clone: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """PRIME-RL's loss functions at a revision: those named above, without the module's imports."""
    command = ["git", "-C", str(clone), "show", f"{request.param}:src/prime_rl/trainer/rl/loss.py"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    tree = ast.parse(shown.stdout)
    tree.body = [
        node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in WANTED
    ]
    module: Any = ModuleType("prime_rl_loss")
    vars(module).update(dataclass=dataclass, field=field, torch=torch)
    sys.modules[module.__name__] = module
    code = compile(tree, "loss.py", "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
    exec(code, vars(module))
    yield module
    del sys.modules[module.__name__]


def theirs_and_ours(
    module: Any, rows: list[Any], formula: Formula, alpha: float, config: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses and gradients of both on their own inputs."""
    results = []
    for function in (
        lambda given: module.default_loss_fn(given, config),
        lambda given: loss_fn(given, formula=formula, alpha_sdpo=alpha),
    ):
        ours = inputs(rows)
        stream = "ref_logprobs" if "ref_logprobs" in module.LossInputs.__annotations__ else "teacher_logprobs"
        named = {k: v for k, v in vars(ours).items() if k not in ("ref_logprobs", "loss_weights")}
        result = function(module.LossInputs(**named, **{stream: ours.ref_logprobs}))
        assert isinstance(result, module.LossOutputs)
        result.loss.backward()
        results += [result.loss.detach(), ours.trainer_logprobs.grad]
    return results[0], results[1], results[2], results[3]


def random_rows(count: int, *, hints: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    values = torch.rand(count, 5, generator=generator, dtype=torch.float64).clamp(1e-3, 0.999).tolist()
    return [(a, b, q if hints else 0.0, 6 * d - 3, m > 0.2) for a, b, q, d, m in values]


@pytest.mark.parametrize("theirs", RELEASES, indirect=True)
def test_current_formula_is_theirs(theirs: Any) -> None:
    config = SimpleNamespace(dppo_mask_low=0.2, dppo_mask_high=0.2, adv_tau=1.0, kl_tau=1e-3)
    found = theirs_and_ours(theirs, random_rows(400, hints=True), "current", 0.0, config)
    assert torch.allclose(found[0], found[2], rtol=0, atol=1e-8)
    assert torch.allclose(found[1], found[3], rtol=0, atol=1e-8)


@pytest.mark.parametrize("theirs", ["v0.5.0"], indirect=True)
@pytest.mark.parametrize("tau", [0.0, 0.6])
def test_formula_of_v0_5_is_theirs(theirs: Any, tau: float) -> None:
    config = SimpleNamespace(ipo_mask_low=0.2, ipo_mask_high=0.2, adv_tau=1.0, kl_tau=1e-3, teacher_tau=tau)
    found = theirs_and_ours(theirs, random_rows(400, hints=True), "v0.5", tau, config)
    assert torch.allclose(found[0], found[2], rtol=0, atol=1e-8)
    assert torch.allclose(found[1], found[3], rtol=0, atol=1e-8)


@pytest.mark.parametrize("theirs", RELEASES[-1:], indirect=True)
@pytest.mark.parametrize("component", [False, True], ids=["in the loss", "in their component"])
def test_their_sum_over_a_step_has_our_gradient(theirs: Any, batch: Batch, component: bool) -> None:
    samples = samples_for(batch, ref_kl_weight=ALPHA if component else 0.0)
    tokens = sum(map(sum, (s["mask"] for s in samples)))
    alpha = 0.0 if component else ALPHA * tokens / batch.hint_tokens
    model = tiny_model()
    given = [columns(sample, model) for sample in samples]
    weights = [torch.tensor(s.get("ref_kl_weights", [0.0] * len(s["mask"]))).double() for s in samples]
    loss, metrics = theirs.compute_loss(
        **{name: [columns[name] for columns in given] for name in given[0]},
        rl_weights=None,
        ce_weights=None,
        ref_kl_weights=weights if component else None,
        rl_loss_fn=lambda columns: loss_fn(columns, alpha_sdpo=alpha),
        rl_scale=tokens,
        ce_scale=1,
        ref_kl_scale=batch.hint_tokens,
    )
    loss.backward()
    assert len(metrics["hint/gap"]) == len(samples)
    error = (gradient(model) - batch.ours).norm() / batch.ours.norm()
    assert error < 1e-6
