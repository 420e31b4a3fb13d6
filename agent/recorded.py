"""Recorded episodes as tokens of a model: once, by that model's own tokenizer and chat template.

The whole conversation is rendered in one go; a turn of the model begins behind the generation prompt and ends
with its end-of-turn token. Who sampled is another model at unknown probabilities: log-probabilities are NaN and
the policy version is ``NOT_SAMPLED``, so a recording feeds hints and pairs and no ratio is formed with it. A hint
says what the recording says of the error; it knows no more. A pair's rejected side is the turn as it was recorded,
its chosen side the teachers' calls alone, as the template writes them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hintloop.agent import hints
from hintloop.agent.conversation import UNRENDERABLE, Conversation, Message, RenderError
from hintloop.agent.policy import ChatFormat
from hintloop.envs.errors import Cause, ToolError
from hintloop.envs.models import ToolCall
from hintloop.replay.episode import NOT_SAMPLED, Episode, HintSite, PreferencePair, Turn
from hintloop.replay.export.chat import actions_of, messages_of

MESSAGE_CHARS = 200
"""Of the error's text, as much goes into the hint."""
_ADVICE = {
    "tool_not_found": "use one of the tools that were used before",
    "type_error": "give the tool all of its required arguments",
    "file_not_found": "look up the path first",
    "repeated_failure": "this call failed before, do something else",
}
"""For kinds whose usual hint names what only a live environment knows."""
_NO_TOKENS = "the turn has no tokens of its own in this chat template"


class NotRendered(Exception):
    """The model's chat template has no place for this conversation."""


@dataclass(frozen=True, slots=True)
class Tokenised:
    """An episode with tokens, and what has none, by reason."""

    episode: Episode
    dropped: Counter[str] = field(default_factory=Counter)
    """Errors that got no hint site."""
    dropped_pairs: Counter[str] = field(default_factory=Counter)


def tokenise(episode: Episode, chat: ChatFormat, *, hint_role: str = "system") -> Tokenised:
    """The tokens of an episode that has text only. Raises ``NotRendered``."""
    messages, of_turn = _numbered(messages_of(episode))
    opening = _generation_prompt(chat)
    try:
        rendered = chat.renderer.render(messages)
    except UNRENDERABLE as error:
        raise NotRendered(f"{type(error).__name__}: {error}") from error
    ids = list(rendered.token_ids)
    spans = _spans(rendered.message_indices, len(messages))
    stops = set(chat.renderer.get_stop_token_ids())
    mask = [0] * len(ids)
    turns: list[Turn] = []
    for turn, number in zip(episode.turns, of_turn, strict=True):
        start, end = spans[number] if number is not None else (0, 0)
        text = turn.text
        if turn.role == "assistant":
            start, end = _sampled(ids, start, end, opening, stops)
            mask[start:end] = [1] * (end - start)
            text = chat.tokenizer.decode(ids[start : end - 1]) if end > start else text
        turns.append(replace(turn, start=start, end=end, text=text))
    sites = [_site(site, turns, messages, of_turn, chat, opening, hint_role) for site in episode.hint_sites]
    pairs = [_pair(pair, turns, ids, chat) for pair in episode.pairs]
    made = replace(
        episode,
        tokenizer_fingerprint=chat.fingerprint,
        token_ids=ids,
        loss_mask=mask,
        logprobs=[math.nan if sampled else 0.0 for sampled in mask],
        policy_versions=[NOT_SAMPLED] * len(ids),
        turns=tuple(turns),
        hint_sites=tuple(site for site in sites if isinstance(site, HintSite)),
        pairs=tuple(pair for pair in pairs if isinstance(pair, PreferencePair)),
    )
    return Tokenised(
        made,
        Counter(site for site in sites if isinstance(site, str)),
        Counter(pair for pair in pairs if isinstance(pair, str)),
    )


def hint_text(turn: Turn) -> str:
    """What could have been known before a recorded turn went wrong. ``KeyError`` for a kind without template."""
    kind, message = turn.error_kind or "", turn.error_message or ""
    if kind in _ADVICE:
        advice = f"Hint: {_ADVICE[kind]}"
    else:
        advice = hints.dispatch(ToolError(kind=kind, message=message, cause=Cause.MODEL)) or ""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return f"{advice}; avoid this: {' '.join(lines)[:MESSAGE_CHARS]}" if lines else advice


def _numbered(told: Sequence[Message | None]) -> tuple[list[Message], list[int | None]]:
    """The messages, and the number of each turn's message; None for a call without result."""
    messages = [message for message in told if message is not None]
    counter = iter(range(len(messages)))
    return messages, [None if message is None else next(counter) for message in told]


def _generation_prompt(chat: ChatFormat) -> list[int]:
    user = [{"role": "user", "content": "x"}]
    opened = list(chat.renderer.render_ids(user, add_generation_prompt=True))
    closed = list(chat.renderer.render_ids(user, add_generation_prompt=False))
    if opened[: len(closed)] != closed or len(opened) == len(closed):
        raise NotRendered("this chat template has no separate generation prompt")
    return opened[len(closed) :]


def _spans(owners: Sequence[int], count: int) -> list[tuple[int, int]]:
    """First token of each message and the one behind its last."""
    spans = [(0, 0)] * count
    for at, owner in enumerate(owners):
        if 0 <= owner < count:
            start, end = spans[owner]
            spans[owner] = (at, at + 1) if start == end else (start, at + 1)
    return spans


def _sampled(
    ids: Sequence[int], start: int, end: int, opening: Sequence[int], stops: set[int]
) -> tuple[int, int]:
    """The tokens of a message that a policy would have sampled; none when it has no header or no end."""
    begin = start + len(opening)
    last = next((at for at in range(end - 1, begin - 1, -1) if ids[at] in stops), None)
    if list(ids[start:begin]) != list(opening) or last is None:
        return start, start
    return begin, last + 1


def _site(
    site: HintSite,
    turns: Sequence[Turn],
    messages: Sequence[Message],
    of_turn: Sequence[int | None],
    chat: ChatFormat,
    opening: Sequence[int],
    role: str,
) -> HintSite | str:
    """The site with its tokens, or why there is none."""
    turn, number = turns[site.turn], of_turn[site.turn]
    if turn.start == turn.end or number is None:
        return _NO_TOKENS
    try:
        text = hint_text(turn)
    except KeyError:
        return f"no hint template for {site.kind}"
    before = messages[number - 1]["role"] if number else "user"
    hint_ids = _hint_ids(chat, text, role, before, opening)
    if hint_ids is None:
        return f"this chat template does not take a {role} message in mid-conversation"
    return replace(
        site,
        hint=text,
        insert_at=turn.start - len(opening),
        start=turn.start,
        end=turn.end,
        hint_ids=tuple(hint_ids),
    )


def _pair(
    pair: PreferencePair, turns: Sequence[Turn], ids: Sequence[int], chat: ChatFormat
) -> PreferencePair | str:
    """The pair with its tokens, or why there is none."""
    turn, actions = turns[pair.turn], actions_of(pair.chosen_text)
    if turn.start == turn.end:
        return _NO_TOKENS
    if actions is None:
        return "the chosen action is no call that can be read"
    calls = [ToolCall(name=name, arguments=arguments) for name, arguments in actions]
    try:
        speaker = Conversation(chat.renderer, [{"role": "user", "content": "x"}], tools=_tools(calls))
        chosen = speaker.encode_calls(0, calls)
    except RenderError as error:
        return str(error)
    except UNRENDERABLE:
        return "this chat template cannot write tools for such a call"
    return replace(
        pair, prompt_end=turn.start, chosen_ids=chosen, rejected_ids=tuple(ids[turn.start : turn.end])
    )


def _tools(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Tools that take ``calls``: where a template writes arguments without quotes, only a tool's schema tells the
    string "5" from the number."""
    given: dict[str, dict[str, Any]] = {}
    for call in calls:
        types = {
            key: {"type": "string"} if isinstance(value, str) else {} for key, value in call.arguments.items()
        }
        given.setdefault(call.name, {}).update(types)
    return [
        {"name": name, "description": "", "parameters": {"type": "object", "properties": types}}
        for name, types in given.items()
    ]


def _hint_ids(
    chat: ChatFormat, text: str, role: str, before: str, opening: Sequence[int]
) -> list[int] | None:
    """A hint message as tokens, as it stands behind a message of the role ``before``; None where it cannot."""
    call = {"type": "function", "function": {"name": "x", "arguments": {}}}
    context: list[Message] = [{"role": "user", "content": "x"}]
    if before in ("tool", "assistant"):
        context.append(
            {"role": "assistant", "content": "x", "tool_calls": [call] if before == "tool" else []}
        )
    if before == "tool":
        context.append({"role": "tool", "content": "x", "name": "x"})
    try:
        plain = list(chat.renderer.render_ids(context, add_generation_prompt=True))
        hint = [*context, {"role": role, "content": text}]
        hinted = list(chat.renderer.render_ids(hint, add_generation_prompt=True))
    except UNRENDERABLE:
        return None
    at = len(plain) - len(opening)
    found = hinted[at : len(hinted) - len(opening)]
    return found if found and hinted == [*plain[:at], *found, *opening] else None
