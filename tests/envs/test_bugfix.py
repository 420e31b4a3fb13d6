"""The bugfix task set and its scripted expert."""

import json

import pytest

from hintloop.envs.models import ToolCall
from hintloop.envs.registry import get_task, load_taskset
from hintloop.envs.tasksets.bugfix.expert import next_call
from hintloop.envs.tasksets.bugfix.functions import run
from hintloop.envs.tasksets.bugfix.mutations import first_difference, mutations, rename, unique_fragment
from hintloop.envs.tasksets.bugfix.taskset import PATH, Bugfix, load


def sample_ids(split: str, step: int) -> list[str]:
    return list(load().splits()[split])[::step]


def test_set_has_enough_functions_and_held_out_bugs():
    taskset = load()
    splits = taskset.splits()
    assert len(taskset.functions) >= 400
    assert len(splits["heldmut"]) >= 300
    assert len(splits["heldfn"]) >= 300


def test_splits_share_no_bug_and_held_out_functions_are_never_trained_on():
    bugs = {name: {task_id.rpartition(".")[0] for task_id in ids} for name, ids in load().splits().items()}
    assert not bugs["train"] & bugs["heldmut"]
    assert not (bugs["train"] | bugs["heldmut"]) & bugs["heldfn"]
    functions = {name: {bug.rpartition(".")[0] for bug in found} for name, found in bugs.items()}
    assert not functions["train"] & functions["heldfn"]
    assert functions["heldmut"] <= functions["train"]
    code = {key: "\n".join(f.lines).partition("(")[2] for key, f in load().functions.items()}
    known = {code[bug.removeprefix("bugfix/")] for bug in functions["train"]}
    assert not known & {code[bug.removeprefix("bugfix/")] for bug in functions["heldfn"]}


def test_set_is_the_same_each_time_it_is_made():
    again = Bugfix()
    assert again.splits() == load().splits()
    task_id = sample_ids("train", 500)[3]
    assert again.get(task_id) == load().get(task_id)


@pytest.mark.parametrize("split", ["train", "heldmut", "heldfn"])
def test_solution_passes_and_bug_fails_a_visible_case(split):
    for task_id in sample_ids(split, 40):
        task = get_task(task_id)
        cases = task.tests.hidden
        inputs = tuple(tuple(case.args) for case in cases)
        assert run(task.solution[PATH], task.tests.function, inputs) == tuple(
            ("ok", c.expected) for c in cases
        )
        shown = tuple(tuple(case.args) for case in task.tests.visible)
        got = run(task.files[PATH], task.tests.function, shown)
        assert [repr(g) for g in got] != [repr(("ok", c.expected)) for c in task.tests.visible]


def test_bug_is_one_token():
    for task_id in sample_ids("train", 97):
        task = get_task(task_id)
        bad, good = task.files[PATH].split("\n"), task.solution[PATH].split("\n")
        differing = [(b, g) for b, g in zip(bad, good, strict=True) if b != g]
        assert len(differing) == 1
        mend = first_difference(*differing[0])
        assert mend is not None
        assert mend.apply([differing[0][0]]) == [differing[0][1]]


@pytest.mark.parametrize("task_id", ["bugfix/none.0.0", "bugfix/x", "bugfix/", "nowhere/1", "bugfix/a.b.c"])
def test_unknown_task_id_is_named(task_id):
    with pytest.raises(KeyError, match=task_id.replace(".", r"\.")):
        get_task(task_id)


def test_fragment_occurs_first_where_the_mutation_is():
    lines = ["def f(a, b):", "    return a + b + 1 if a + b > 1 else a - 1"]
    for mutation in mutations(lines):
        line = lines[mutation.line]
        old, new = unique_fragment(line, mutation)
        assert line.replace(old, new, 1) == mutation.apply(lines)[mutation.line]


def test_rename_changes_whole_identifiers_only():
    assert rename(["    t = total(x, xt)"], {"t": "acc", "x": "v"}) == ["    acc = total(v, xt)"]


def transcript(task, calls):
    """Messages as a teacher gets them, with the real effect of each call."""
    from hintloop.agent.student.traces import TrustedWorkspace
    from hintloop.envs.tools import ToolBox

    box = ToolBox(task, TrustedWorkspace({PATH: task.files[PATH].encode()}))
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": task.instruction}]
    for call in calls:
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}
        )
        messages.append({"role": "tool", "tool_call_id": "1", "content": box.call(call).output})
    return messages


def test_expert_solves_every_task_from_the_transcript_alone():
    for task_id in sample_ids("heldfn", 12) + sample_ids("train", 700):
        task, calls = load_taskset("bugfix").get(task_id), []
        for _ in range(6):
            call = next_call(transcript(task, calls))
            assert call is not None
            if call.name == "submit":
                break
            calls.append(call)
        assert [c.name for c in calls] == ["read_file", "edit_file", "run_tests"], task_id
        assert "FAIL" not in transcript(task, calls)[-1]["content"]


def test_expert_undoes_a_wrong_edit():
    task = get_task(sample_ids("train", 900)[2])
    line = task.files[PATH].split("\n")[1]
    calls = [
        ToolCall(name="read_file", arguments={"path": PATH}),
        ToolCall(name="edit_file", arguments={"path": PATH, "line": 2, "old": line, "new": line + "  # odd"}),
    ]
    for _ in range(3):
        call = next_call(transcript(task, calls))
        calls.append(call)
        if call.name == "run_tests":
            break
    assert "FAIL" not in transcript(task, calls)[-1]["content"]


def test_expert_says_nothing_of_other_tasks():
    assert next_call([{"role": "user", "content": "Write a poem: sonnet should give: joy"}]) is None
