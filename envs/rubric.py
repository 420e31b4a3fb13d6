"""The reward of an episode as OpenEnv rubrics: a tree of parts that others can look into and hook on to.

Importing it imports OpenEnv's judges too, so only servers do.
"""

from __future__ import annotations

from openenv.core.rubrics import Rubric

from hintloop.envs.models import ToolCall, ToolResult

NOT_A_CALL = frozenset({"json_decode", "tool_not_found", "type_error"})
"""Kinds of tool errors that say that no tool could be called."""


class Part(Rubric):
    """One part of the reward, as its name is in ``reward_parts``; 0 where the grader found none."""

    def __init__(self, name: str):
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name

    def forward(self, action: ToolCall, observation: ToolResult) -> float:
        """The part's score."""
        return observation.reward_parts.get(self._name, 0.0)


class EpisodeRubric(Rubric):
    """What the last step of a graded episode earns: the grader's reward for work that was handed in, else 0.

    ``format`` (share of the calls that called a tool) and ``cost`` (share of the turns that were used) are kept, and
    do not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tests, self.submitted = Part("tests"), Part("submitted")
        self.format, self.cost = Part("format"), Part("cost")

    def forward(self, action: ToolCall, observation: ToolResult) -> float:
        """``observation.reward`` is the grader's."""
        _, submitted, *_ = [part(action, observation) for part in self.children()]
        return float(observation.reward or 0.0) if submitted else 0.0
