"""What turning a long episode into tokens costs, beside its new texts alone and beside rendering it all anew.

    python benchmarks/rollout_tokens.py [--turns 128] [--tokens 65536] [--model FOLDER]

``tokenizer``: CPU time to tokenise each tool result once, as bare text. ``suffixes``: each exchange (a call and its
result) through the chat template once, as if there were nothing before it. ``conversation``: the same as one growing
episode, with the record of every token. ``rerender``: each turn's prompt rendered from all messages so far, as a loop
without token-exact prefixes does. The ratios are to ``suffixes``; the least of all rounds counts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from hintloop.agent.conversation import Conversation, Message
from hintloop.agent.engine import Sample
from hintloop.agent.policy import ChatFormat, load_renderer
from hintloop.agent.student import build

STUDENT = Path(build.__file__).parent / "student-tiny"
CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "solution.py"}}\n</tool_call>'
WORDS = ("def", "return", "value", "index", "error", "import", "test", "raise", "None", "for", "range", "len")


def texts(chat: ChatFormat, turns: int, tokens: int, seed: int) -> list[str]:
    """Tool results that, with the calls between them, make an episode of about so many tokens."""
    rng = random.Random(seed)
    call = len(chat.tokenizer.encode(CALL, add_special_tokens=False)) + 16  # the template's own tokens
    wanted = max(tokens // turns - call, 1)

    def text() -> str:
        made = " ".join(f"{rng.choice(WORDS)}_{rng.randrange(10**4)}" for _ in range(wanted))
        ids = chat.tokenizer.encode(made, add_special_tokens=False)[:wanted]
        cut: str = chat.tokenizer.decode(ids)
        return cut

    return [text() for _ in range(turns)]


def first(count: int) -> list[Message]:
    """The opening messages."""
    return [
        {"role": "system", "content": "Tools: read_file(path)"},
        {"role": "user", "content": f"Task {count}"},
    ]


def tokenizer(chat: ChatFormat, results: list[str], sample: Sample) -> int:
    """Each text once, as it is."""
    backend = chat.tokenizer.backend_tokenizer
    return sum(len(backend.encode(text, add_special_tokens=False).ids) for text in results)


def suffixes(chat: ChatFormat, results: list[str], sample: Sample) -> int:
    """Each exchange once, after the opening messages."""
    opened = chat.renderer.render_ids(first(0), add_generation_prompt=True)
    total, completion = 0, list(sample.token_ids)
    for text in results:
        chat.renderer.parse_response(completion)
        message = {"role": "tool", "content": text}
        total += len(chat.renderer.bridge_to_next_turn(opened, completion, [message]).token_ids) - len(opened)
    return total


def conversation(chat: ChatFormat, results: list[str], sample: Sample) -> int:
    """As an episode is played."""
    grown = Conversation(chat.renderer, first(0))
    for text in results:
        grown.add_sample(sample)
        grown.add_results([text])
    return len(grown.token_ids)


def rerender(chat: ChatFormat, results: list[str], sample: Sample) -> int:
    """Everything anew for each turn."""
    messages, ids = first(0), []
    call = {"function": {"name": "read_file", "arguments": {"path": "solution.py"}}}
    for text in results:
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": text},
        ]
        ids = chat.renderer.render_ids(messages, add_generation_prompt=True)
    return len(ids)


KINDS = (tokenizer, suffixes, conversation, rerender)


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", type=Path, default=STUDENT, help="folder with a tokenizer")
    args = parser.parse_args()
    chat = load_renderer(args.model)
    stop = chat.renderer.get_stop_token_ids()[0]
    ids = (*chat.tokenizer.encode(CALL, add_special_tokens=False), stop)
    sample = Sample(ids, (-1.0,) * len(ids), (0,) * len(ids), "stop")
    least: dict[str, float] = {}
    found: dict[str, Any] = {"kind": "tokens", "turns": args.turns}
    for number in range(args.rounds):
        for place, work in enumerate(KINDS):
            # Texts of their own for each measurement: short ones are remembered.
            results = texts(chat, args.turns, args.tokens, len(KINDS) * number + place)
            started = time.process_time()
            tokens = work(chat, results, sample)
            seconds = time.process_time() - started
            least[work.__name__] = min(seconds, least.get(work.__name__, seconds))
            found["tokens"] = tokens
    for name, seconds in least.items():
        found[f"{name}_ms"] = round(1e3 * seconds, 1)
        found[f"{name}_ratio"] = round(seconds / least["suffixes"], 2)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
