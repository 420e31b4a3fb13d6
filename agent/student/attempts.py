"""What a student does in states of tasks: the calls that it samples, whether they fail, what was right instead.

No code that the student wrote runs here: an attempt ends at ``run_tests``, ``bash`` or ``submit``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hintloop.agent import hints
from hintloop.agent.conversation import Conversation
from hintloop.agent.engine import Sample
from hintloop.agent.student.traces import TrustedWorkspace, call_text, first_messages
from hintloop.envs.models import ToolCall
from hintloop.envs.task import Task
from hintloop.envs.tasksets.bugfix.expert import next_fix
from hintloop.envs.tasksets.bugfix.taskset import PATH, reference
from hintloop.envs.tools import ToolBox

MAX_NEW_TOKENS = 64
READ = ToolCall(name="read_file", arguments={"path": PATH})
_RUNS_CODE = ("run_tests", "bash", "submit")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One turn of a student: its context, what it said, and what would have been right."""

    conversation: Conversation
    turn: int
    said: list[int]
    right: list[int]
    kind: str | None
    """Of the error; None when the call did what it should."""
    hint: str | None
    """The hint of that error."""

    @property
    def context(self) -> list[int]:
        """The tokens before the turn."""
        return self.conversation.token_ids[: self.conversation.prompt_end(self.turn)]

    def hinted(self, hint: str) -> list[int]:
        """The context with a hint in front of the turn."""
        where = self.conversation.hint(self.turn, hint)
        return self.context[: where.insert_at] + list(where.hint_ids) + self.context[where.insert_at :]


class _Play:
    """A task under way."""

    def __init__(self, task: Task, renderer: Any, tokenizer: Any, *, has_read: bool):
        self._task, self._tokenizer = task, tokenizer
        self._workspace = TrustedWorkspace({PATH: task.files[PATH].encode()})
        self._box = ToolBox(task, self._workspace)
        self._has_read = has_read
        self.conversation = Conversation(renderer, first_messages(task))
        if has_read:
            self._go_on(self._tokens(READ), self._box.call(READ).output)

    def take(self, said: list[int], stop: int) -> Attempt | None:
        """What became of a turn; None when it ran code or was cut off."""
        call = self.conversation.parse(said)[0]
        if said[-1] != stop or call.name in _RUNS_CODE:
            return None
        right = next_fix(self._workspace.text, reference(self._task)) if self._has_read else READ
        turn = self.conversation.num_turns - 1
        result = self._box.call(call)
        hint = hints.dispatch(result.error) if result.error else None
        self._go_on(said, result.output)
        if right is None or (result.error and hint is None):
            return None
        kind = result.error.kind if result.error else None
        return Attempt(self.conversation, turn, said, self._tokens(right), kind, hint)

    def _go_on(self, said: Sequence[int], output: str) -> None:
        self.conversation.add_sample(Sample(tuple(said), (0.0,) * len(said), (0,) * len(said), "stop"))
        self.conversation.add_results([output])

    def _tokens(self, call: ToolCall) -> list[int]:
        ids: list[int] = self._tokenizer.encode(call_text(call) + "<|im_end|>", add_special_tokens=False)
        return ids


def attempts(
    model: Any, renderer: Any, tokenizer: Any, tasks: Sequence[Task], *, has_read: bool, turns: int = 1
) -> list[Attempt]:
    """Let the student take up to ``turns`` turns in each task, at temperature 1; after a failed call it goes on.

    ``has_read``: the file has been read already.
    """
    plays = [_Play(task, renderer, tokenizer, has_read=has_read) for task in tasks]
    found: list[Attempt] = []
    for _ in range(turns):
        said = _sample(model, [play.conversation.token_ids for play in plays])
        taken = [play.take(ids, model.config.eos_token_id) for play, ids in zip(plays, said, strict=True)]
        found += [attempt for attempt in taken if attempt]
        plays = [play for play, attempt in zip(plays, taken, strict=True) if attempt and attempt.kind]
        if not plays:
            break
    return found


@torch.no_grad()
def _sample(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """One continuation per prompt at temperature 1."""
    length = max(map(len, prompts))
    ids = torch.zeros(len(prompts), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, prompt in enumerate(prompts):
        ids[index, length - len(prompt) :] = torch.tensor(prompt)
        mask[index, length - len(prompt) :] = 1
    out = model.generate(
        ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=MAX_NEW_TOKENS
    )[:, length:]
    stop = model.config.eos_token_id
    return [row[: row.index(stop) + 1] if stop in row else row for row in out.tolist()]
