"""Small models, tokenizers and episodes for the learner's tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hintloop.replay.episode import Episode, HintSite, Outcome, PreferencePair, Turn

VOCABULARY = 48


def tiny_model(
    seed: int = 0, vocabulary: int = VOCABULARY, hidden: int = 32, layers: int = 2, *, tied: bool = True
) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights; the default has about 20,000 of them."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=0.1 if hidden < 64 else 0.02,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).float()


def tiny_tokenizer(vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """One word per id."""
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, vocabulary)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def save_student(folder: Path, *, seed: int = 0) -> Path:
    """A loadable model folder."""
    tiny_model(seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def make_episode(
    name: str,
    group: str,
    random: np.random.Generator,
    *,
    reward: float | None = 1.0,
    turns: int = 3,
    prompt: int = 6,
    turn_tokens: tuple[int, int] = (3, 6),
    tool_tokens: tuple[int, int] = (2, 5),
    version: int = 0,
    sites: int = 0,
    hint_tokens: int = 3,
    pairs: int = 0,
    vocabulary: int = VOCABULARY,
    logprob: float = -2.0,
) -> Episode:
    """A random episode: a prompt, then turns of sampled tokens, each followed by a tool's answer.

    A turn starts with a generation prompt of one token. The first ``sites`` turns are hint sites and the
    first ``pairs`` turns have a preference pair whose rejected action is the turn itself.
    """
    ids: list[int] = [int(t) for t in random.integers(2, vocabulary, prompt)]
    mask, made, hints, preferred = [0] * prompt, [], [], []
    for index in range(turns):
        insert_at = len(ids)
        ids.append(2)
        start = len(ids)
        size = int(random.integers(*turn_tokens))
        ids += [*(int(t) for t in random.integers(2, vocabulary, size - 1)), 1]
        mask += [0] + [1] * size
        made.append(Turn("assistant", start, len(ids), "act", tool_name="run"))
        if index < sites:
            hint = tuple(int(t) for t in random.integers(2, vocabulary, hint_tokens))
            hints.append(HintSite(2 * index, "type_error", "a hint", insert_at, start, len(ids), hint))
        if index < pairs:
            chosen = (*(int(t) for t in random.integers(2, vocabulary, size)), 1)
            preferred.append(
                PreferencePair(
                    2 * index, start, chosen, tuple(ids[start:]), "good", "bad", 1, 1, True, ("teacher",)
                )
            )
        answer = int(random.integers(*tool_tokens))
        made.append(Turn("tool", len(ids), len(ids) + answer, "out"))
        ids += [int(t) for t in random.integers(2, vocabulary, answer)]
        mask += [0] * answer
    return Episode(
        episode_id=name,
        group_id=group,
        task_id="toy/1",
        env="toy",
        source="rollout",
        created_at=0.0,
        model="tiny",
        tokenizer_fingerprint="none",
        token_ids=tuple(ids),
        loss_mask=tuple(mask),
        logprobs=tuple(logprob * (1 + 0.1 * float(random.random())) if m else 0.0 for m in mask),
        policy_versions=tuple(version if m else -1 for m in mask),
        turns=tuple(made),
        outcome=Outcome.INFRA_ERROR if reward is None else Outcome.SOLVED if reward else Outcome.FAILED,
        reward=reward,
        hint_sites=tuple(hints),
        pairs=tuple(preferred),
    )


def make_groups(
    count: int, size: int, *, seed: int = 0, rewards: Sequence[float | None] = (1.0, 0.0), **options: object
) -> list[list[Episode]]:
    """``count`` groups of ``size`` episodes; rewards are taken in turn."""
    random = np.random.default_rng(seed)
    return [
        [
            make_episode(f"e{g}-{i}", f"g{g}", random, reward=rewards[i % len(rewards)], **options)  # type: ignore[arg-type]
            for i in range(size)
        ]
        for g in range(count)
    ]


def uneven_groups() -> list[list[list[Episode]]]:
    """Two steps. In the micro-batches of a pair of processes, one lacks hints and pairs, or the policy loss, or all."""
    random, rich = np.random.default_rng(0), {"sites": 2, "pairs": 1, "logprob": -3.7}
    short = [make_episode(f"s{i}", "g", random, turns=1, reward=float(i)) for i in range(2)]
    long = [make_episode(f"l{i}", "g", random, reward=float(i), **rich) for i in range(2)]  # type: ignore[arg-type]
    lone = make_episode("n", "h", random, turns=4, **rich)  # type: ignore[arg-type]
    return [[[short[0], *long]], [short, [lone]]]
