"""HumanEvalFix: 164 Python functions with one bug each (HumanEvalPack, Muennighoff et al. 2023).

The environment variable ``HINTLOOP_HUMANEVALFIX`` names a JSONL file of its Python rows, or a folder with one;
without it they come from ``bigcode/humanevalpack`` on the Hugging Face hub.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hintloop.envs.task import AssertTests, Task
from hintloop.envs.tasksets.sources import Collection, rows

NAME = "humanevalfix"
PATH = "solution.py"
_CHECK = re.compile(r"^def check\(.*?(?=^check\(|\Z)", re.MULTILINE | re.DOTALL)


def load() -> Collection:
    """The task set. ``ValueError`` when there is no data."""
    tasks = [make_task(row) for row in rows("HINTLOOP_HUMANEVALFIX", "bigcode/humanevalpack", "python")]
    return Collection(NAME, "HumanEvalFix: mend the bug in a Python function", tasks)


def make_task(row: Mapping[str, str]) -> Task:
    """A task from a row of HumanEvalPack."""
    name, declaration = row["entry_point"], row["declaration"]
    before = declaration[: declaration.index(f"def {name}(")]
    return Task(
        task_id=f"{NAME}/{row['task_id'].rpartition('/')[2]}",
        instruction=f"Fix the bug in `{name}` in `{PATH}`. What the function should do:\n\n{row['docstring']}",
        files={PATH: declaration + row["buggy_solution"]},
        tests=AssertTests(PATH, name, _check(before, row["example_test"]), _check(before, row["test"])),
        solution={PATH: declaration + row["canonical_solution"]},
        metadata={"bug_type": row["bug_type"]},
    )


def _check(before: str, test: str) -> str:
    """The test's ``check`` alone, without its call, after what it may use of the module: imports and helpers."""
    found = _CHECK.findall(test)
    return f"{before}\n{found[-1].rstrip()}\n" if found else ""
