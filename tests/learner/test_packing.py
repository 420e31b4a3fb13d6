"""Trees in rows: the states are those of the plain sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hintloop.learner.packing import Packed, Path, Tree, grow, pack, require_masks

from .factory import tiny_model

tokens = st.lists(st.integers(2, 4), min_size=1, max_size=12)


def array(ids: list[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int64)


def common(one: list[int], two: list[int]) -> int:
    """Length of the common beginning."""
    return max(n for n in range(len(one) + 1) if one[:n] == two[:n])


def states(model: torch.nn.Module, rows: Packed) -> torch.Tensor:
    """(B, W, H)"""
    return model.base_model(
        input_ids=rows.ids, attention_mask=rows.mask(), position_ids=rows.positions
    ).last_hidden_state


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_states_and_gradients_are_those_of_plain_sequences(attention: str) -> None:
    random = np.random.default_rng(0)
    packed_model, plain_model = tiny_model(), tiny_model()
    packed_model.set_attn_implementation(attention)
    require_masks(packed_model)
    trees, sequences = [], []
    for length in (5, 14, 23):
        trunk = random.integers(2, 48, length)
        # At the start, in the middle (twice), at the end, and nowhere.
        forks = (0, length // 2, length // 2, length)
        paths = [np.concatenate([trunk[:fork], random.integers(2, 48, 6)]) for fork in forks]
        paths.append(trunk[: length - 1])
        shared = [random.integers(0, n + 1) for n in (*forks, length - 1)]
        split = [Path(n, path[n:]) for n, path in zip(shared, paths, strict=True)]
        trees.append(grow(trunk, split, keep=length - 2))
        sequences.append([*paths, trunk[: length - 2]])
    hidden = states(packed_model, pack(trees))
    loss = torch.zeros(())
    for row, (tree, plain) in enumerate(zip(trees, sequences, strict=True)):
        columns = [tree.columns(n, np.arange(len(path))) for n, path in enumerate(plain[:-1])]
        columns.append(np.arange(len(plain[-1])))
        for where, ids in zip(columns, plain, strict=True):
            expected = plain_model.base_model(torch.from_numpy(ids)[None]).last_hidden_state[0]
            torch.testing.assert_close(hidden[row, where], expected, atol=1e-5, rtol=1e-5)
            loss = loss + expected.pow(3).sum() - hidden[row, where].pow(3).sum()
    loss.backward()
    for packed, plain in zip(packed_model.parameters(), plain_model.parameters(), strict=True):
        assert plain.grad is not None
        assert plain.grad.norm() > 0
        assert (packed.grad + plain.grad).norm() < 1e-5 * plain.grad.norm()
    assert hidden.isfinite().all()


@given(trunk=tokens, paths=st.lists(tokens, max_size=4), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_tree_holds_each_path_and_no_more_than_it_must(
    trunk: list[int], paths: list[list[int]], data: st.DataObject
) -> None:
    keep = data.draw(st.integers(0, len(trunk)))
    shared = [data.draw(st.integers(0, common(trunk, path))) for path in paths]
    split = [Path(n, array(path[n:])) for n, path in zip(shared, paths, strict=True)]
    tree = grow(array(trunk), split, keep=keep)
    packed = pack([tree, Tree(np.zeros(len(tree) + 1, dtype=np.int64), (), ())])
    visible = packed.mask()[0, 0] == 0
    assert packed.ids[0, :keep].tolist() == trunk[:keep]
    for number, path in enumerate(paths):
        columns = tree.columns(number, np.arange(len(path)))
        assert packed.ids[0, columns].tolist() == path
        assert packed.positions[0, columns].tolist() == list(range(len(path)))
        for size, column in enumerate(columns, 1):
            assert visible[column].nonzero()[:, 0].tolist() == list(columns[:size])
    assert len(tree) <= keep + sum(map(len, paths))
    assert visible[len(tree)].nonzero().tolist() == [[len(tree)]]  # padding sees itself


def test_a_path_along_the_trunk_costs_nothing() -> None:
    trunk = np.arange(2, 12)
    row = pack([grow(trunk, [Path(1, trunk[1:4]), Path(0, np.array([2, 3, 40, 41]))])])
    assert row.ids[0].tolist() == [2, 3, 4, 5, 40, 41]
    assert row.branch[0].tolist() == [0, 0, 0, 0, 2, 2]
    assert row.fork[0].tolist() == [0, 0, 0, 0, 2, 2]
    assert row.positions[0].tolist() == [0, 1, 2, 3, 2, 3]


def test_an_attention_that_takes_no_mask_is_refused() -> None:
    model = tiny_model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2'"):
        require_masks(model)
