"""The tree of a Claude Code file: which records make one message, and which messages one conversation.

Records point to their parents. A message of the model may be split over many records, its calls may run in
parallel and their results come in any order, so records are first gathered into messages, by message id and
call id; the parents then link messages. A prompt that was taken back leaves a branch, a sub-agent or a
compaction a tree of its own. Only numbers are kept, about 150 bytes per record, so that a file of any size can
be planned before its text is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hintloop.replay.ingest.report import Report

LINK, USER, ASSISTANT, RESULT = range(4)
"""What a record is: nothing but a link to its parent, a user's message, part of a model's message, or results."""
_NONE = 0
_UNKNOWN = -2
_BUDGET_FACTOR = 4
"""Shared beginnings of branches are read again for each branch, up to this many times the file."""
_BUDGET_FLOOR = 64 << 20


@dataclass(frozen=True, slots=True)
class Step:
    """One message: its records in the order of the file."""

    kind: int
    places: tuple[tuple[int, int], ...]
    """Of each record, where it starts in the file, and its size."""
    copied: bool
    """It was part of an earlier conversation of the file."""


class Tree:
    """Records by number, in the order of the file."""

    def __init__(self) -> None:
        self._start, self._size, self._kind = array("q"), array("i"), array("b")
        self._parent, self._side, self._group, self._answer = array("q"), array("q"), array("q"), array("q")
        self._by_uuid: dict[int, int] = {}
        self._by_call: dict[int, int] = {}
        self._by_group: dict[int, int] = {}
        self._more_answers: dict[int, list[int]] = {}
        self._relinks: list[tuple[int, int, int]] = []

    def add(
        self,
        start: int,
        size: int,
        kind: int,
        *,
        uuid: object,
        parent: object,
        side: object,
        message_id: object = None,
        calls: tuple[object, ...] = (),
        answers: tuple[object, ...] = (),
    ) -> bool:
        """Add a record of ``size`` bytes at ``start``; False, and nothing is added, when its uuid is known already.

        ``side`` tells sub-agents and the main conversation apart; a parent on another side is none.
        """
        own = _key(uuid)
        number = len(self._kind)
        if own != _NONE and self._by_uuid.setdefault(own, number) != number:
            return False
        side_key = hash(side)
        group = number
        if kind == ASSISTANT and isinstance(message_id, str):
            group = self._by_group.setdefault(hash((side_key, message_id)), number)
        for call in calls:
            self._by_call.setdefault(hash((side_key, call)), group)
        first = _NONE
        if answers:
            keys = [hash((side_key, answer)) for answer in answers]
            first = keys[0]
            if len(keys) > 1 or kind == USER:
                self._more_answers[number] = keys
        self._start.append(start)
        self._size.append(size)
        self._kind.append(kind)
        self._parent.append(_key(parent))
        self._side.append(side_key)
        self._group.append(group)
        self._answer.append(first)
        return True

    def relink(self, head: object, anchor: object) -> None:
        """After the last record, the message ``head`` has ``anchor`` as its parent: a compaction kept it."""
        self._relinks.append((_key(head), _key(anchor), len(self._kind) - 1))

    def forget_keys(self) -> None:
        """Give the memory back that only planning needs; nothing can be added any more."""
        for index in (self._by_uuid, self._by_call, self._by_group, self._more_answers):
            index.clear()
        for column in (self._parent, self._side, self._group, self._answer):
            del column[:]

    def conversations(self, report: Report) -> Iterator[list[Step]]:
        """Every conversation, the longest first, each ending with a message of the model; to be called once.

        What is left over is counted in ``report`` when the last one has been given.
        """
        plan = _Plan(self, report)
        yield from plan.paths()
        plan.count()


class _Plan:
    """The finished tree; a message has the number of its first record."""

    def __init__(self, tree: Tree, report: Report) -> None:
        self._tree, self._report = tree, report
        self._kind = tree._kind
        self._node = self._nodes()
        self._up = self._parents()
        self._covered = bytearray(len(self._kind))
        nodes = np.asarray(self._node)
        order = np.argsort(nodes, kind="stable")
        # As plain arrays, of which single numbers are had much faster.
        self._order = array("q", order.tobytes())
        self._bounds = array("q", np.searchsorted(nodes[order], np.arange(len(nodes) + 1)).tobytes())
        self._extra: dict[int, list[int]] = {}
        for number, keys in tree._more_answers.items():
            for node in {tree._by_call.get(key, -1) for key in keys} - {-1, self._node[number]}:
                self._extra.setdefault(node, []).append(number)
        self._heads = self._relinked()
        tree.forget_keys()

    def paths(self) -> Iterator[list[Step]]:
        """As ``Tree.conversations``."""
        total = sum(self._tree._size)
        budget = _BUDGET_FACTOR * total + _BUDGET_FLOOR
        for leaf in self._leaves():
            tip = self._answered(leaf)
            if tip < 0 or self._covered[tip]:
                continue
            path = self._walk(tip, leaf)
            steps = [self._step(node) for node in path]
            budget -= sum(size for step in steps if step.copied for _, size in step.places) + len(steps)
            if budget < 0:
                self._report.note("branches_beyond_limit")
                continue
            for node in path:
                self._covered[node] = 1
            yield steps

    def count(self) -> None:
        """Say of each record of the conversation whether it was used."""
        kinds, nodes = np.asarray(self._kind), np.asarray(self._node)
        told = kinds != LINK
        found = told & (nodes >= 0)
        used = found & (np.frombuffer(self._covered, np.uint8)[nodes] == 1) if len(nodes) else found
        self._report.used += int(used.sum())
        for reason, left in (
            ("result_without_call", told & ~found),
            ("prompt_without_answer", found & ~used & (kinds == USER)),
            ("branch_left_out", found & ~used & (kinds != USER)),
        ):
            if left.any():
                self._report.ignored[reason] += int(left.sum())

    def _nodes(self) -> array[int]:
        """The message of each record; -1 for links, and for results of calls that are not in the file."""
        tree = self._tree
        nodes = array("q", tree._group)  # of a user's message its own number
        by_call, answer = tree._by_call, tree._answer
        for number, kind in enumerate(self._kind):
            if kind == RESULT:
                nodes[number] = by_call.get(answer[number], -1)
            elif kind == LINK:
                nodes[number] = -1
        return nodes

    def _parents(self) -> array[int]:
        """The message before each message; -1 at a root."""
        tree = self._tree
        above = array("q", [_UNKNOWN]) * len(self._kind)
        parents = array("q", [-1]) * len(self._kind)
        for number, kind in enumerate(self._kind):
            if self._node[number] != number:
                continue
            answered = tree._by_call.get(tree._answer[number], -1) if kind == USER else -1
            parent = answered if answered >= 0 else self._above(number, above)
            parents[number] = parent if parent != number else -1
        return self._without_cycles(parents)

    def _above(self, number: int, known: array[int]) -> int:
        """The message that the parent of a record belongs to, through any number of links."""
        tree, passed = self._tree, []
        result = -1
        while known[number] == _UNKNOWN:
            passed.append(number)
            known[number] = -1  # for a circle of links
            parent = tree._by_uuid.get(tree._parent[number], -1)
            if parent < 0 and tree._parent[number] != _NONE:
                self._report.note("parent_missing")
            if parent < 0 or tree._side[parent] != tree._side[number]:
                break
            if self._node[parent] >= 0:
                result = self._node[parent]
                break
            number = parent
        else:
            result = known[number]
        for each in passed:
            known[each] = result
        return result

    def _without_cycles(self, parents: array[int]) -> array[int]:
        state = bytearray(len(parents))  # 1: on the way up now, 2: reaches a root
        for number in range(len(parents)):
            passed = []
            while number >= 0 and not state[number]:
                state[number] = 1
                passed.append(number)
                number = parents[number]
            if number >= 0 and state[number] == 1:
                parents[number] = -1
                self._report.note("parent_circle")
            for each in passed:
                state[each] = 2
        return parents

    def _leaves(self) -> list[int]:
        """Messages that none follows, by the length of their conversation."""
        followed = bytearray(len(self._up))
        depth = array("q", [0]) * len(self._up)
        for number, parent in enumerate(self._up):
            if parent >= 0:
                followed[parent] = 1
            passed = []
            while number >= 0 and not depth[number]:
                passed.append(number)
                number = self._up[number]
            below = depth[number] if number >= 0 else 0
            for each in reversed(passed):
                below += 1
                depth[each] = below
        leaves = [n for n in range(len(self._up)) if self._node[n] == n and not followed[n]]
        return sorted(leaves, key=lambda n: (-depth[n], n))

    def _answered(self, node: int) -> int:
        while node >= 0 and self._kind[node] != ASSISTANT:
            node = self._up[node]
        return node

    def _walk(self, tip: int, leaf: int) -> list[int]:
        path, seen, node = [], set(), tip
        while node >= 0 and node not in seen:
            seen.add(node)
            path.append(node)
            anchors = [anchor for after, anchor in self._heads.get(node, ()) if after < leaf]
            node = anchors[-1] if anchors else self._up[node]
        return path[::-1]

    def _relinked(self) -> dict[int, list[tuple[int, int]]]:
        """By message: after which record it has which other parent."""
        tree = self._tree
        found: dict[int, list[tuple[int, int]]] = {}
        for head_key, anchor_key, after in tree._relinks:
            head, anchor = tree._by_uuid.get(head_key, -1), tree._by_uuid.get(anchor_key, -1)
            if head < 0 or anchor < 0 or self._node[head] < 0:
                self._report.note("kept_messages_missing")
                continue
            found.setdefault(self._node[head], []).append((after, self._node[anchor]))
        return found

    def _step(self, node: int) -> Step:
        members = self._order[self._bounds[node] : self._bounds[node + 1]].tolist()  # ascending
        if node in self._extra:
            members = sorted([*members, *self._extra[node]])
        start, size = self._tree._start, self._tree._size
        places = tuple([(start[number], size[number]) for number in members])
        return Step(self._kind[node], places, bool(self._covered[node]))


def _key(value: object) -> int:
    return hash(value) or 1 if isinstance(value, str) else _NONE
