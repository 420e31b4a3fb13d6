"""Builds the tiny student: tokenizer, warm start on expert traces, and a model folder that loads anywhere.

What was left out: packing, mixed precision, evaluation inside the loop. The recipe is the one of
``docs/student.md``: Muon on the hidden matrices and AdamW on the rest, a curriculum from files with many
bugs to files with one, practice in using hints, and an average of the weights.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from renderers import Qwen3RendererConfig, create_renderer
from transformers import Qwen3Config, Qwen3ForCausalLM

from hintloop.agent.student.encode import Encoded, TraceEncoder
from hintloop.agent.student.fit import Fit, weighted_loss
from hintloop.agent.student.practice import practise
from hintloop.agent.student.tokenizer import SPECIAL_TOKENS, train_tokenizer
from hintloop.agent.student.traces import TraceMaker
from hintloop.envs.tasksets.bugfix.taskset import load

_TOKENIZER_TRACES = 3000
_BUCKET = 16
"""Batches that are sorted by length together."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Warm-start settings; the defaults make the packaged student."""

    steps: int = 600
    """On expert traces."""
    hint_steps: int = 160
    """Of practice in using hints, afterwards."""
    batch_size: int = 16
    muon_learning_rate: float = 0.02
    adam_learning_rate: float = 3e-3
    hint_batch_size: int = 8
    """Failed calls per step of the practice."""
    hint_rate: float = 0.3
    """Step sizes of the practice, as a part of the ones above."""
    multiple_early: float = 0.75
    """Share of files with several bugs in the first 40 % of the steps; falls linearly until 65 %."""
    multiple_late: float = 0.15
    seed: int = 0
    threads: int = 1


OnStep = Callable[[int, dict[str, float]], None]
Progress = Callable[[int, int, dict[str, float]], None]


def build(folder: Path, recipe: Recipe | None = None, on_progress: Progress | None = None) -> Path:
    """Build the student into ``folder`` (made anew). Same recipe and thread count, same student."""
    recipe = recipe or Recipe()
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give a new folder for the student")
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed)
    maker = TraceMaker(load(), random.Random(recipe.seed))
    tokenizer = train_tokenizer(_tokenizer_texts(maker))
    encoder = TraceEncoder(create_renderer(tokenizer, Qwen3RendererConfig()), tokenizer)
    model = new_model(len(tokenizer), int(tokenizer.eos_token_id))
    averaged = warm_start(model, maker, encoder, recipe, on_progress)
    save(folder, averaged, tokenizer, recipe)
    return folder


def new_model(vocabulary: int, end_of_turn: int) -> Qwen3ForCausalLM:
    """An untrained Qwen3 of about 0.9 million parameters."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=end_of_turn,
        pad_token_id=0,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def warm_start(
    model: Qwen3ForCausalLM,
    maker: TraceMaker,
    encoder: TraceEncoder,
    recipe: Recipe,
    on_progress: Progress | None = None,
) -> Qwen3ForCausalLM:
    """Supervised training on traces made on the fly, then practice with hints; returns the averaged weights."""
    fit = Fit(
        model,
        muon_learning_rate=recipe.muon_learning_rate,
        adam_learning_rate=recipe.adam_learning_rate,
    )
    total = recipe.steps + recipe.hint_steps

    def say(step: int, values: dict[str, float]) -> None:
        if on_progress is not None:
            on_progress(step + 1, total, values)

    learn_traces(fit, maker, encoder, recipe, say)
    practise(
        fit,
        maker,
        encoder.renderer,
        encoder.tokenizer,
        steps=recipe.hint_steps,
        batch_size=recipe.hint_batch_size,
        rate=recipe.hint_rate,
        on_step=lambda step, values: say(recipe.steps + step, values),
    )
    return fit.averaged


def learn_traces(fit: Fit, maker: TraceMaker, encoder: TraceEncoder, recipe: Recipe, on_step: OnStep) -> None:
    """The first part: ``recipe.steps`` steps on expert traces."""
    bucket: list[list[Encoded]] = []
    for step in range(recipe.steps):
        done = step / recipe.steps
        if not bucket:
            bucket = _make_batches(maker, encoder, recipe, done)
        rate = min(1.0, (step + 1) / 60) * (1.0 if done < 0.6 else 1 - 0.7 * (done - 0.6) / 0.4)
        loss, said = weighted_loss(fit.model, bucket.pop())
        fit.step(loss, rate)
        on_step(step, {"loss": float(loss.detach()), "said": said})


def save(folder: Path, model: Qwen3ForCausalLM, tokenizer: Any, recipe: Recipe) -> None:
    """Write a model folder; ``hintloop.json`` names the renderer and the prompt style."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    about = {
        "renderer": "qwen3",
        "prompt": "one_line",
        "recipe": {f: getattr(recipe, f) for f in recipe.__slots__},
    }
    folder.joinpath("hintloop.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _tokenizer_texts(maker: TraceMaker) -> list[str]:
    """What the tokenizer is trained on: traces, and the words of every intent (held-out ones are words, too)."""
    texts = [function.intent for function in load().functions.values() for _ in range(8)]
    for _ in range(_TOKENIZER_TRACES):
        trace = maker.single()
        texts += [message["content"] for message in trace.messages]
        for turn in trace.turns:
            texts += [_without_special(turn.text), turn.output, turn.hint or ""]
    return texts


def _without_special(text: str) -> str:
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "")
    return text


def _make_batches(
    maker: TraceMaker, encoder: TraceEncoder, recipe: Recipe, done: float
) -> list[list[Encoded]]:
    fall = min(1.0, max(0.0, (done - 0.4) / 0.25))
    multiple = recipe.multiple_early + fall * (recipe.multiple_late - recipe.multiple_early)
    rows = []
    for _ in range(recipe.batch_size * _BUCKET):
        trace = maker.multiple() if maker.rng.random() < multiple else maker.single()
        rows.append(encoder.encode(trace))
    rows.sort(key=lambda row: len(row.token_ids))
    batches = [rows[i : i + recipe.batch_size] for i in range(0, len(rows), recipe.batch_size)]
    maker.rng.shuffle(batches)
    return batches
