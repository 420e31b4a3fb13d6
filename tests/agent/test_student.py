"""The tiny student: traces, their encoding, the optimizer, a short build, and the packaged weights."""

import copy
import json
import random
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from hintloop.agent.conversation import Conversation
from hintloop.agent.engine import Sample
from hintloop.agent.policy import load_renderer
from hintloop.agent.student.attempts import attempts
from hintloop.agent.student.build import Recipe, build, new_model
from hintloop.agent.student.encode import EDIT_WEIGHT, TraceEncoder
from hintloop.agent.student.fit import Fit
from hintloop.agent.student.hint_use import measure
from hintloop.agent.student.muon import Muon, orthogonalise
from hintloop.agent.student.practice import contrast
from hintloop.agent.student.traces import Habits, Trace, TraceMaker
from hintloop.envs.tasksets.bugfix.taskset import load

PACKAGED = Path(str(files("hintloop.agent.student") / "student-tiny"))
NO_HINTS = Habits(hinted_trace=0.0, guided=0.0)


@pytest.fixture(scope="module")
def chat():
    return load_renderer(PACKAGED)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(PACKAGED)


def maker(seed: int, habits: Habits | None = None) -> TraceMaker:
    return TraceMaker(load(), random.Random(seed), habits)


def test_traces_make_errors_get_hints_and_mostly_succeed():
    traces = [maker(seed).single() for seed in range(120)]
    turns = [turn for trace in traces for turn in trace.turns]
    assert sum(turn.output.startswith("error: ") for turn in turns) > 50
    assert sum(turn.hint is not None for turn in turns) > 50
    assert sum("submitted" in trace.turns[-1].output for trace in traces) > 60


def test_habits_without_hints_give_none():
    traces = [
        trace for seed in range(30) for trace in (maker(seed, NO_HINTS).single(), maker(seed).multiple())
    ]
    assert all(turn.hint is None for trace in traces[::2] for turn in trace.turns)


def test_file_with_many_bugs_is_mended_line_by_line():
    for seed in range(20):
        trace = maker(seed).multiple()
        assert [turn.output for turn in trace.turns[1:-1]] == ["ok"] * (len(trace.turns) - 2)
        assert trace.turns[-1].output == "submitted"


def test_same_seed_gives_the_same_traces():
    assert [maker(3).single() for _ in range(5)] == [maker(3).single() for _ in range(5)]


def replay(trace: Trace, chat, tokenizer) -> list[int]:
    """The ids that the live loop would have for this trace."""
    conversation = Conversation(chat.renderer, trace.messages)
    for index, turn in enumerate(trace.turns):
        said = tuple(tokenizer.encode(turn.text + "<|im_end|>", add_special_tokens=False))
        conversation.add_sample(Sample(said, (0.0,) * len(said), (0,) * len(said), "stop"))
        if index < len(trace.turns) - 1:
            conversation.add_results([turn.output])
    return conversation.token_ids


def test_encoded_trace_is_what_the_live_loop_sees(chat, tokenizer):
    encoder = TraceEncoder(chat.renderer, tokenizer)
    for seed in range(25):
        trace = maker(seed, NO_HINTS).single()
        encoded = encoder.encode(trace, 10_000)
        assert encoded.token_ids == replay(trace, chat, tokenizer)
        assert len(encoded.weights) == len(encoded.token_ids)


def test_hinted_turn_equals_the_teacher_context_of_a_live_hint(chat, tokenizer):
    encoder = TraceEncoder(chat.renderer, tokenizer)
    checked = 0
    for seed in range(120):
        trace = maker(seed).single()
        at = [index for index, turn in enumerate(trace.turns) if turn.hint]
        if len(at) != 1:
            continue
        conversation = Conversation(chat.renderer, trace.messages)
        for turn in trace.turns[: at[0]]:
            said = tuple(tokenizer.encode(turn.text + "<|im_end|>", add_special_tokens=False))
            conversation.add_sample(Sample(said, (0.0,) * len(said), (0,) * len(said), "stop"))
            conversation.add_results([turn.output])
        where = conversation.hint(at[0], trace.turns[at[0]].hint)
        ids = conversation.token_ids
        teacher = ids[: where.insert_at] + list(where.hint_ids) + ids[where.insert_at :]
        assert encoder.encode(trace, 10_000).token_ids[: len(teacher)] == teacher
        checked += 1
    assert checked >= 5


def test_edit_arguments_weigh_most(chat, tokenizer):
    trace = next(t for t in (maker(s, NO_HINTS).multiple() for s in range(9)) if len(t.turns) == 4)
    encoded = TraceEncoder(chat.renderer, tokenizer).encode(trace, 10_000)
    heavy = [i for i, w in zip(encoded.token_ids, encoded.weights, strict=True) if w == EDIT_WEIGHT]
    call = json.loads(trace.turns[1].text.split("\n")[1])["arguments"]
    assert tokenizer.decode(heavy).startswith(
        f'{call["line"]}, "old": "{call["old"]}", "new": "{call["new"]}'
    )


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16)])
def test_orthogonalised_matrix_has_singular_values_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_muon_descends_and_takes_matrices_only():
    weight = torch.nn.Parameter(torch.eye(6))
    optimizer = Muon([weight], lr=0.1)
    losses = []
    for _ in range(30):
        loss = (weight - 2 * torch.eye(6).flip(0)).square().sum()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    with pytest.raises(ValueError, match="matrices"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


def test_short_build_learns_loads_and_is_reproducible(tmp_path):
    recipe = Recipe(steps=3, hint_steps=0, batch_size=2)
    losses = []
    first = build(tmp_path / "a", recipe, lambda step, total, values: losses.append(values["loss"]))
    second = build(tmp_path / "b", recipe)
    assert losses[-1] < losses[0]
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()
    assert load_renderer(first).prompt == "one_line"
    with pytest.raises(ValueError, match="not empty"):
        build(tmp_path / "a", recipe)


def test_attempts_go_on_after_failures_and_know_what_was_right(chat, tokenizer):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM.from_pretrained(PACKAGED)
    tasks = [maker(seed).task() for seed in range(24)]
    found = attempts(model, chat.renderer, tokenizer, tasks, has_read=True, turns=3)
    failed = [attempt for attempt in found if attempt.hint]
    assert 3 <= len(failed) <= len(found)
    assert any(attempt.turn > 1 for attempt in found)
    for attempt in failed:
        assert attempt.kind is not None
        hinted = attempt.hinted(attempt.hint)
        assert attempt.hint in tokenizer.decode(hinted)
        assert attempt.hint not in tokenizer.decode(attempt.context)
        assert "edit_file" in tokenizer.decode(attempt.right)


def test_practice_teaches_what_a_hint_is_for(chat, tokenizer):
    torch.manual_seed(0)
    start = Qwen3ForCausalLM.from_pretrained(PACKAGED)
    student = copy.deepcopy(start)
    tasks = [maker(seed).task() for seed in range(24)]
    found = attempts(start, chat.renderer, tokenizer, tasks, has_read=True)
    chosen = [(attempt, "Hint: look elsewhere") for attempt in found if attempt.hint][:4]
    fit = Fit(student, muon_learning_rate=0.002, adam_learning_rate=3e-4)
    first = [float(loss.detach()) for loss in contrast(student, start, chosen)]
    for _ in range(8):
        same, better = contrast(student, start, chosen)
        fit.step(same + better, 1.0)
    last = [float(loss.detach()) for loss in contrast(student, start, chosen)]
    assert sum(last) < sum(first)
    assert last[1] < first[1]


def test_a_student_that_cannot_call_yet_cannot_practise(tmp_path):
    with pytest.raises(ValueError, match="train it longer"):
        build(tmp_path / "a", Recipe(steps=1, hint_steps=1, batch_size=1))


def test_use_of_hints_is_measured_at_failing_calls_of_its_own():
    rows = {row.kind: row for row in measure(PACKAGED, num_states=96)}
    assert rows["all"].n >= 10
    assert rows["all"].n >= sum(row.n for kind, row in rows.items() if kind != "all")
    for row in rows.values():
        for mean, error in (row.failing_matching, row.failing_other, row.right_matching, row.right_other):
            assert -30 < mean < 30
            assert 0 < error < 10
        assert row.failing_difference[0] == pytest.approx(row.failing_matching[0] - row.failing_other[0])
        assert row.right_difference[0] == pytest.approx(row.right_matching[0] - row.right_other[0])


def test_packaged_student_is_small_and_whole():
    size = sum(path.stat().st_size for path in PACKAGED.glob("*.safetensors"))
    assert 1_000_000 < size <= 5_000_000
    config = json.loads((PACKAGED / "config.json").read_text())
    assert new_model(config["vocab_size"], config["eos_token_id"]).num_parameters() < 1_250_000
