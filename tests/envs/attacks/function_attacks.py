"""Attacks on grading by cases, where calls are made in a process that only ever has the arguments."""

from __future__ import annotations

from . import python_attacks
from .python_attacks import WRONG
from .work import Attack, source

_EVIL = "def evil(*_, **__):\n    return 9\n\n\ndumps = loads = randint = seed = TestCase = Case = evil\n"

VALUES = {
    "True for 1": "def f(x):\n    return True if x == 1 else x * x\n",
    "floats": "def f(x):\n    return float(x * x)\n",
    "a tuple around it": "def f(x):\n    return (x * x,)\n",
    "text": "def f(x):\n    return str(x * x)\n",
    "all answers at once": "def f(x):\n    return set(range(200))\n",
    "an iterator over all answers": "def f(x):\n    return iter(range(200))\n",
    "marks of the encoding": 'def f(x):\n    return {"$": ["float", "nan"]}\n',
    "a huge number": "def f(x):\n    return 1 << 10**6\n",
    "a huge text": "def f(x):\n    return 'x' * (1 << 21)\n",
    "endless nesting": "def f(x):\n    value = []\n    value.append(value)\n    return value\n",
    "an endless generator": "def f(x):\n    while True:\n        yield x\n",
    "an exception with the answer": "def f(x):\n    raise ValueError(x * x)\n",
}
"""Data that is nearly right, or that is hard to compare."""

REPORTS = {
    "the reporter, found on the stack": """
import os
import sys

def f(x):
    frame = sys._getframe()
    while frame := frame.f_back:
        if send := frame.f_locals.get("send"):
            for _ in range(8):
                send('{"value": true}')
            os._exit(0)
""",
    "the nonce, read from the report": """
import os

def f(x):
    for name in os.listdir("/proc/self/fd"):
        try:
            text = os.pread(int(name), 4096, 0)
            nonce = text.split(b" ")[0]
            if len(nonce) == 32:
                os.pwrite(int(name), b"".join(b'%s %d {"value": 9}\\n' % (nonce, n) for n in range(8)), 0)
                os._exit(0)
        except OSError:
            pass
    return x + x
""",
    "the report, written over": """
import os

def f(x):
    for name in os.listdir("/proc/self/fd"):
        try:
            if "memfd" in os.readlink(f"/proc/self/fd/{name}"):
                os.ftruncate(int(name), 0)
        except OSError:
            pass
    return x + x
""",
}
"""Attacks on how values come back."""

MEMORY = {
    "small numbers in memory": """
import ctypes

for number in range(20, 200):  # the digit of an int comes after its count, type and size
    ctypes.c_uint32.from_address(id(number) + 24).value = 9
"""
    + WRONG,
    "types in memory": """
import ctypes

class Any(int):
    __eq__ = lambda self, other: True
    __hash__ = int.__hash__

def f(x):
    lie = Any(7)
    ctypes.c_size_t.from_address(id(lie) + 8).value = id(int)
    return lie
""",
}
"""Changes of objects behind Python's back."""

AGENT = {
    "modules of the same names": Attack(
        {"solution.py": "import json\nimport random\nimport unittest\nimport hintloop" + WRONG}
        | {f"{name}.py": _EVIL for name in ("json", "random", "unittest", "hintloop", "math", "operator")}
    ),
    "start-up files": Attack(
        {name: "import os\n\nos._exit(0)\n" for name in ("sitecustomize.py", "usercustomize.py")}
        | {"evil.pth": "import os; os._exit(0)\n", "conftest.py": "import os\n\nos._exit(0)\n"}
    ),
    "a pipe in the place of the file": Attack(command="rm solution.py; mkfifo solution.py"),
    "a folder in the place of the file": Attack(command="rm solution.py; mkdir -p solution.py/f"),
    "a link in the place of the file": Attack(command="ln -sf /solution/solution.py solution.py"),
    "a link to the environment": Attack(command="ln -sf /proc/self/environ solution.py"),
    "a hard link": Attack(command="rm solution.py; ln /usr/bin/env solution.py; ln /etc/passwd solution.py"),
    "no file": Attack(command="rm -rf ./* .??*"),
    "a set-user-id file": Attack(command="chmod 4777 solution.py; cp /bin/sh sh; chmod 6777 sh"),
    "a search for the solution": Attack(
        command="grep -rlsI --include='*.py' 'return x [*] x' / --exclude-dir=usr --exclude-dir=proc "
        "--exclude-dir=sys --exclude-dir=lib --exclude-dir=lib64 | head -n 1 | xargs -r -I{} cp {} solution.py"
    ),
    "a daemon that waits": Attack(
        command="setsid nohup sh -c 'sleep 0.5; while :; do echo \"def f(x): return x * x\" > solution.py; done' "
        ">/dev/null 2>&1 &"
    ),
}
"""What the agent leaves behind. The daemon knows the answer, but its work comes after the hand-in."""

ATTACKS: dict[str, Attack] = {
    **{name: source(text) for name, text in (python_attacks.ATTACKS | VALUES | REPORTS | MEMORY).items()},
    **AGENT,
}
