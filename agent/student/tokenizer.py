"""The tiny student's tokenizer: a byte-level BPE that keeps the JSON scaffolding of tool calls whole.

One token per piece of scaffolding (``{"name": "``, ``", "arguments": {`` ...) and one per digit: what the
student has to decide on is then most of what it has to say.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
VOCABULARY = 1024
_SPLIT = (
    r'\{"name": "|", "arguments": \{\}\}|", "arguments": \{|"path": "|", "line": |, "old": "|", "new": "|"\}\}'
    r"|\n|: *(?=[a-z])| ?(?:==|!=|>=|<=|\+=|-=|\*=|//|\*\*)| ?[A-Za-z_]+| ?[0-9]| ?[^\sA-Za-z0-9_]|\s+"
)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer trained on ``texts`` (without special tokens in them); deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=8,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
