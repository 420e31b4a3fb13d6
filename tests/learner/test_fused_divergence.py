"""The generalised divergence of hidden states: Liger's values, tiles against dense, memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hintloop.learner.losses import divergence
from hintloop.learner.losses.divergence import fused_generalized_jsd, generalized_jsd
from hintloop.learner.losses.head import Head
from hintloop.learner.losses.topk import TopK

from .values import BETAS, SUPPORTS, value_and_gradient


def heads(softcap: float | None = None, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Head]:
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(50, 9, generator=generator).to(dtype) for _ in range(2)]
    return [Head(w[:, :8].contiguous(), w[:, 8].contiguous(), scale, softcap) for w in weights]


def states(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    hidden, hinted = torch.randn(2, rows, 8, generator=generator).to(dtype)
    return hidden.requires_grad_(), hinted


@pytest.mark.parametrize("beta", BETAS)
def test_fused_equals_liger(beta: float) -> None:
    chunked_loss = pytest.importorskip(
        "liger_kernel.chunked_loss", reason="liger-kernel is not among the dependencies", exc_type=ImportError
    )
    hidden, hinted = states(6)
    student, teacher = heads()
    liger = chunked_loss.LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, temperature=1.1, compiled=False, chunk_size=4
    )
    biases, labels = (student.bias, teacher.bias), torch.zeros(6, dtype=torch.long)
    theirs = value_and_gradient(
        lambda h: liger(h, student.weight, hinted, teacher.weight, labels, *biases), hidden
    )
    settings = {"temperature": 1.1, "mask": labels == 0, "reduction": "mean"}
    ours = value_and_gradient(
        lambda h: fused_generalized_jsd(h, hinted, student, teacher, beta=beta, **settings), hidden
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("top_k", SUPPORTS)
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, 4.0)])
def test_tiles_give_the_dense_divergence(
    beta: float, top_k: TopK | None, scale: float, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, hinted = states(9)
    student, teacher = heads(softcap, scale)
    student.weight.requires_grad_()
    mask = torch.tensor([True] * 7 + [False] * 2)
    results = []
    for limit in (1 << 24, 3 * 50, 0):
        monkeypatch.setattr(divergence, "DENSE_ELEMENTS", limit)
        hidden.grad = student.weight.grad = None
        value = fused_generalized_jsd(
            hidden,
            hinted,
            student,
            teacher,
            beta=beta,
            temperature=1.2,
            top_k=top_k,
            clip=2.0,
            weights=torch.linspace(0.5, 1.5, 9),
            mask=mask,
        )
        value.sum().backward()
        results.append((value.detach(), hidden.grad, student.weight.grad))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[2], results[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("top_k", [None, TopK(4)])
def test_the_fused_divergence_is_the_one_of_the_logits(top_k: TopK | None) -> None:
    hidden, hinted = states(6)
    student, teacher = heads(softcap=4.0, scale=0.5)
    settings = {
        "beta": 0.3,
        "top_k": top_k,
        "mask": torch.tensor([[True, False, True], [True, True, False]]),
        "reduction": "mean",
        "denominator": 9,
    }
    fused = value_and_gradient(
        lambda h: fused_generalized_jsd(
            h.reshape(2, 3, -1), hinted.reshape(2, 3, -1), student, teacher, **settings
        ),
        hidden,
    )
    dense = value_and_gradient(
        lambda h: generalized_jsd(
            student.logits(h).reshape(2, 3, -1), teacher.logits(hinted).reshape(2, 3, -1), **settings
        ),
        hidden,
    )
    torch.testing.assert_close(fused, dense)


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 6])
@pytest.mark.parametrize("top_k", [None, TopK(4)])
def test_any_number_of_positions_can_be_tiled(
    rows: int, top_k: TopK | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, hinted = states(6)
    function = partial(
        fused_generalized_jsd,
        teacher=hinted[:rows],
        student_head=heads()[0],
        teacher_head=heads()[1],
        beta=0.5,
        top_k=top_k,
    )
    dense = value_and_gradient(lambda h: function(h[:rows]), hidden)
    monkeypatch.setattr(divergence, "DENSE_ELEMENTS", 3 * 50 - 1 if rows > 3 else 0)
    torch.testing.assert_close(value_and_gradient(lambda h: function(h[:rows]), hidden), dense)
    assert dense[0].shape == (rows,)
    assert dense[1].any(-1).tolist() == [i < rows for i in range(6)]


def test_tiles_of_a_half_precision_model_are_projected_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, hinted = (x.detach().bfloat16() for x in states(6))
    student, teacher = heads(dtype=torch.bfloat16)
    raised = [Head(h.weight.float(), h.bias.float()) for h in (student, teacher)]
    dense = fused_generalized_jsd(hidden.float(), hinted.float(), *raised, beta=0.5)
    monkeypatch.setattr(divergence, "DENSE_ELEMENTS", 0)
    tiled = fused_generalized_jsd(hidden, hinted, student, teacher, beta=0.5)
    torch.testing.assert_close(tiled, dense, atol=1e-5, rtol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = result if isinstance(result, tuple | list) else [result]
        self.elements = max(self.elements, *(t.numel() for t in tensors if isinstance(t, Tensor)), 0)
        return result


def test_tiled_top_k_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, hinted = states(40)
    largest = []
    for limit in (1 << 24, 12 * 50):
        monkeypatch.setattr(divergence, "DENSE_ELEMENTS", limit)
        with LargestTensor() as mode:
            fused_generalized_jsd(hidden, hinted, *heads(), beta=0.5, top_k=TopK(4)).sum().backward()
        largest.append(mode.elements)
    assert largest == [40 * 50, 12 * 50]


def test_recomputed_gradients_equal_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "DENSE_ELEMENTS", 2 * 50)
    hidden, hinted = states(5, torch.float64)
    student, teacher = heads(softcap=4.0, dtype=torch.float64)
    weight = student.weight.requires_grad_()

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return fused_generalized_jsd(
            h, hinted, Head(w, student.bias, 1.0, 4.0), teacher, beta=0.5, top_k=TopK(4)
        )

    assert torch.autograd.gradcheck(loss, (hidden, weight), fast_mode=True)


@pytest.mark.parametrize("limit", [1 << 24, 0])
@pytest.mark.parametrize("top_k", [None, TopK(4)])
def test_without_a_hint_a_shared_head_learns_nothing(
    limit: int, top_k: TopK | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "DENSE_ELEMENTS", limit)
    hidden, _ = states(5)
    head = heads()[0]
    head.weight.requires_grad_()
    loss = fused_generalized_jsd(hidden, hidden, head, head, beta=0.5, top_k=top_k).sum()
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    for leaf in (hidden, head.weight):
        assert leaf.grad is not None
        assert leaf.grad.abs().max() < 1e-6


def test_states_that_do_not_belong_together_are_refused() -> None:
    hidden, hinted = states(5)
    student, teacher = heads()
    with pytest.raises(ValueError, match="same positions"):
        fused_generalized_jsd(hidden, hinted[:4], student, teacher, beta=0.5)
    with pytest.raises(ValueError, match="50 and 40"):
        fused_generalized_jsd(hidden, hinted, student, Head(teacher.weight[:40]), beta=0.5)
    with pytest.raises(ValueError, match="needs a boolean mask"):
        fused_generalized_jsd(hidden, hinted, student, teacher, beta=0.5, reduction="sum")
