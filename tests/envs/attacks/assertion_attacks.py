"""Attacks on grading by assertions, which only ever meet answers that are plain data."""

from __future__ import annotations

from . import python_attacks
from .python_attacks import WRONG
from .work import Attack, source

ANSWERS = {
    "the end of an iteration": "def f(x):\n    raise StopIteration\n",
    "the right exception": "def f(x):\n    raise AssertionError\n",
    "an exit": "def f(x):\n    raise SystemExit(0)\n",
    "an interrupt": "def f(x):\n    raise KeyboardInterrupt\n",
    "an exception of a class that lies": """
class Meta(type):
    __name__ = property(lambda cls: "StopIteration")

class Odd(Exception, metaclass=Meta):
    pass

def f(x):
    raise Odd
""",
    "infinity": "def f(x):\n    return float('inf')\n",
    "nothing": "def f(x):\n    return None\n",
    "a counter of everything": "from collections import Counter\n\n\ndef f(x):\n    return Counter()\n",
    "an iterator": "def f(x):\n    return iter([x * x])\n",
    "an answer that changes": "n = 0\n\n\ndef f(x):\n    global n\n    n += 1\n    return n\n",
    "forged marks": """
import os
import sys

def f(x):
    frame = sys._getframe()
    while frame := frame.f_back:
        if send := frame.f_locals.get("send"):
            for _ in range(20):
                send('{"value": {"$": ["iterator", {"$": ["defaultdict"]}]}}')
            os._exit(0)
""",
}
"""Data and exceptions that assertions may not expect."""

FILES = {
    "a harness of its own": Attack(
        {
            "solution.py": "import hintloop_harness" + WRONG,
            "hintloop_harness.py": "def replay(*_):\n"
            '    return {"executed": 9, "held": 9, "failed": None, "missing": []}\n\n\nrecord = replay\n',
            "ast.py": "raise SystemExit(0)\n",
            "check.py": "def check(f):\n    pass\n",
        }
    ),
    "a forged verdict": source(
        'print(\'{"executed": 9, "held": 9, "failed": null, "missing": []}\')' + WRONG
    ),
    "the check, looked for": source("""
import os

def f(x):
    for folder in ("/workspace", "/tests", "/solution", "/tmp"):
        for root, _, names in os.walk(folder):
            for name in names:
                with open(os.path.join(root, name), errors="replace") as file:
                    if "x * " + "x" in file.read():
                        return x ** 2
    return x + x
"""),
}
"""Files that the check might meet."""

ATTACKS: dict[str, Attack] = {
    **{name: source(text) for name, text in (python_attacks.ATTACKS | ANSWERS).items()},
    **FILES,
}
