"""The slot cache: keys and values of many sequences in one tensor, and attention that reads them there.

One step is one forward of a flat row of tokens, ``[1, tokens]``: first one token for each of the rows
``0 .. decoding``, then the chunks of prompt that still have to be computed. ``SlotCache.plan`` says where
each token belongs; the model's own layers call ``SlotCache.update`` to store keys and values there, and
``attend`` (known to transformers as ``ATTENTION``) to read them where they are: a step copies no keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "hintloop_slots"
"""Name of the attention implementation that a model must be set to before it can run on a ``SlotCache``."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a cache must know about a model."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> Geometry:
        """Raises ``ValueError`` for a model with anything but full attention in every layer."""
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if getattr(config, "sliding_window", None):
            kinds.add("sliding_attention")
        if kinds != {"full_attention"}:
            raise ValueError(f"only full attention can run in slots; {config.model_type} has {sorted(kinds)}")
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens of one row, to be computed in one step: ``tokens`` go to positions ``start ..``."""

    row: int
    start: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """``begin:end`` of the flat row; it sees keys ``0:width``, and ``mask`` is [1, 1, tokens, width]."""

    row: int
    begin: int
    end: int
    width: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: ``rows`` and ``positions`` are [tokens], ``mask`` of decoding [decoding, 1, 1, width]."""

    rows: torch.Tensor
    positions: torch.Tensor
    decoding: int
    width: int
    mask: torch.Tensor | None
    chunks: tuple[ChunkPlan, ...]


class SlotCache(Cache):
    """Keys and values of ``slots`` sequences of up to ``max_length`` tokens.

    The storage is [slots, layers, 2, kv_heads, max_length + 1, head_dim]. Position ``max_length`` is a bin: a
    row that has nothing to decode in a step writes there, and nothing ever reads it.
    """

    def __init__(
        self, geometry: Geometry, *, slots: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.max_length = max_length
        # Zeros, not empty: an idle row inside the decoding range is computed too, and must stay finite.
        self._data = torch.zeros(
            (slots, geometry.layers, 2, geometry.kv_heads, max_length + 1, geometry.head_dim),
            dtype=dtype,
            device=device,
        )
        self._keys = [self._data[:, layer, 0] for layer in range(geometry.layers)]
        self._values = [self._data[:, layer, 1] for layer in range(geometry.layers)]
        self._step: Step | None = None

    def plan(self, positions: Sequence[int], chunks: Sequence[Chunk]) -> Step:
        """The next step: row ``i`` decodes at ``positions[i]`` (``max_length``: idle); then chunks."""
        device = self._data.device
        rows = list(range(len(positions)))
        places = list(positions)
        plans = []
        for chunk in chunks:
            begin, width = len(rows), chunk.start + len(chunk.tokens)
            rows += [chunk.row] * len(chunk.tokens)
            places += range(chunk.start, width)
            plans.append((chunk.row, begin, len(rows), width))
        where = torch.tensor(places, device=device)
        width = 1 + max((place for place in positions if place < self.max_length), default=0)
        self._step = Step(
            rows=torch.tensor(rows, device=device),
            positions=where,
            decoding=len(positions),
            width=width,
            mask=self._mask(where[: len(positions)], width)[:, None, None] if positions else None,
            chunks=tuple(
                ChunkPlan(row, begin, end, seen, self._mask(where[begin:end], seen)[None, None])
                for row, begin, end, seen in plans
            ),
        )
        return self._step

    def _mask(self, positions: torch.Tensor, width: int) -> torch.Tensor:
        """Additive mask [tokens, width]: a token sees its own position and all before it."""
        hidden = torch.arange(width, device=positions.device) > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._data.dtype, device=positions.device)
        return mask.masked_fill_(hidden, -torch.inf)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [1, kv_heads, tokens, head_dim] of the planned step; returns the layer's whole storage."""
        assert self._step is not None, "plan() comes before every forward"
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        rows, positions = self._step.rows, self._step.positions
        keys[rows, :, positions] = key_states[0].transpose(0, 1)
        values[rows, :, positions] = value_states[0].transpose(0, 1)
        return keys, values

    def copy(self, source: int, target: int, length: int) -> None:
        """Give row ``target`` the first ``length`` positions of row ``source``."""
        self._data[target, ..., :length, :] = self._data[source, ..., :length, :]

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchange the first ``length`` positions of two rows."""
        kept = self._data[one, ..., :length, :].clone()
        self.copy(other, one, length)
        self._data[other, ..., :length, :] = kept


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    step: Step,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the flat row ``query`` [1, heads, tokens, head_dim] over one layer's storage.

    Returns [1, tokens, heads, head_dim]. Raises ``ValueError`` for a model that wants more than softmax(QK)V.
    """
    if softcap is not None or s_aux is not None or position_bias is not None:
        raise ValueError("attention with soft caps, sinks or position biases cannot run in slots")
    _, heads, tokens, head_dim = query.shape
    kv_heads = key.shape[1]
    grouped = query[0].transpose(0, 1).view(tokens, kv_heads, heads // kv_heads, head_dim)
    outputs = []
    if step.decoding:
        n, w = step.decoding, step.width
        # The heads of one group are the "queries" of its key head: no key is repeated.
        out = scaled_dot_product_attention(
            grouped[:n], key[:n, :, :w], value[:n, :, :w], attn_mask=step.mask, scale=scaling
        )
        outputs.append(out.reshape(n, heads, head_dim))
    for chunk in step.chunks:
        outputs.append(_attend_chunk(grouped[chunk.begin : chunk.end], key, value, chunk, scaling))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chunk: ChunkPlan, scaling: float | None
) -> torch.Tensor:
    """From a chunk's ``query`` [tokens, kv_heads, group, head_dim] to [tokens, heads, head_dim]."""
    tokens, kv_heads, group, head_dim = query.shape
    shape = (kv_heads, group, chunk.width, head_dim)
    out = scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key[chunk.row, :, None, : chunk.width].expand(shape),
        value[chunk.row, :, None, : chunk.width].expand(shape),
        attn_mask=chunk.mask,
        scale=scaling,
    )
    return out.permute(2, 0, 1, 3).reshape(tokens, kv_heads * group, head_dim)


# The name is ours alone, so registering it does not change what any other model does.
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
