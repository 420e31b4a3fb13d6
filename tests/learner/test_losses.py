"""What the losses are computed from: log-probabilities behind the head."""

from __future__ import annotations

import torch

from hintloop.learner.losses.head import Head


def test_head_logprobs_and_entropy_are_those_of_its_logits() -> None:
    torch.manual_seed(0)
    head, hidden = Head(torch.randn(50, 8), torch.randn(50), 0.5, 4.0), torch.randn(9, 8)
    targets = torch.randint(0, 50, (9,))
    logps, entropy = head.logprobs(hidden, targets, temperature=0.7, entropy=True)
    expected = torch.log_softmax(head.logits(hidden) / 0.7, -1)
    torch.testing.assert_close(logps, expected[torch.arange(9), targets])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))
