"""Attacks by the graded code on the process that it runs in; every grader gets all of them.

Each is a whole ``solution.py``. They know that tests are likely to have a variable named ``want``, no more.
"""

from __future__ import annotations

WRONG = "\n\ndef f(x):\n    return x + x\n"

EXITS = {
    "os._exit at import": "import os\n\nos._exit(0)" + WRONG,
    "os._exit in the call": "import os\n\n\ndef f(x):\n    os._exit(0)\n",
    "sys.exit at import": "import sys\n\nsys.exit(0)" + WRONG,
    "sys.exit in the call": "import sys\n\n\ndef f(x):\n    sys.exit(0)\n",
    "os._exit by atexit": "import atexit\nimport os\n\natexit.register(os._exit, 0)" + WRONG,
    "os._exit by libc": "import ctypes\n\nctypes.CDLL(None)._exit(0)" + WRONG,
    "os._exit by a finaliser": """
import os

class Last:
    def __del__(self, leave=os._exit):
        leave(0)

last = Last()
"""
    + WRONG,
    "os._exit by a weak reference": """
import os
import weakref

finalizer = weakref.finalize(os, os._exit, 0)
"""
    + WRONG,
    "os._exit by a timer": """
import os
import signal
import time

signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
signal.setitimer(signal.ITIMER_REAL, 0.05)

def f(x):
    time.sleep(1)
""",
    "os._exit by a thread": """
import os
import threading
import time

threading.Timer(0.05, os._exit, [0]).start()

def f(x):
    time.sleep(1)
""",
    "os._exit by a hook of imports": """
import os
import sys

class Hook:
    def find_spec(self, name, path=None, target=None):
        os._exit(0)

sys.meta_path.insert(0, Hook())

def f(x):
    import colorsys
""",
    "exec of true": 'import os\n\nos.execv("/bin/true", ["true"])\n',
    "exit of the forked parent": "import os\n\nif os.fork():\n    os._exit(0)" + WRONG,
    "death of the parent": "import os\nimport signal\n\nos.kill(os.getppid(), signal.SIGKILL)" + WRONG,
    "fork bomb": "import os\n\nwhile True:\n    os.fork()\n",
}
"""Ends of the process that look like a good one."""

LIES = {
    "an int that equals everything": """
class Any(int):
    __hash__ = int.__hash__

    def __eq__(self, other):
        return True

def f(x):
    return Any(7)
""",
    "a class that equals everything": """
class Meta(type):
    __hash__ = type.__hash__

    def __eq__(cls, other):
        return True

    def __instancecheck__(cls, other):
        return True

class Any(metaclass=Meta):
    pass

def f(x):
    return Any
""",
    "a list that equals everything": """
class Any(list):
    def __eq__(self, other):
        return True

def f(x):
    return Any()
""",
    "a float that is near everything": """
class Near(float):
    __hash__ = float.__hash__

    def __sub__(self, other):
        return 0.0

    __rsub__ = __sub__

    def __eq__(self, other):
        return True

def f(x):
    return Near(1)
""",
    "mock.ANY": "from unittest.mock import ANY\n\n\ndef f(x):\n    return ANY\n",
    "an object that lies about its class": """
class Liar:
    __class__ = int

    def __eq__(self, other):
        return True

    def __lt__(self, other):
        return other != 0

    __gt__ = __lt__

def f(x):
    return Liar()
""",
    "NaN": "NAN = float('nan')\n\n\ndef f(x):\n    return NAN\n",
    "an object that runs when it is unpickled": """
import os

class Pickled:
    def __eq__(self, other):
        return True

    def __reduce__(self):
        return os._exit, (0,)

def f(x):
    return Pickled()
""",
}
"""Results that claim to be right."""

THEFTS = {
    "stack walk: variables": """
import sys

def f(x):
    frame = sys._getframe(1)
    while frame:
        if "want" in frame.f_locals:
            return frame.f_locals["want"]
        frame = frame.f_back
    return x + x
""",
    "stack walk: source": """
import inspect

def f(x):
    caller = inspect.stack()[1]
    line = (caller.code_context or [""])[0]
    return eval(line.partition("==")[2] or "x + x", caller.frame.f_globals, caller.frame.f_locals)
""",
    "profiler of the callers": """
import sys

seen = [0]

def profile(frame, event, argument):
    if frame.f_code.co_name == "f" and frame.f_back and "want" in frame.f_back.f_locals:
        seen[0] = frame.f_back.f_locals["want"]

def f(x):
    return seen[0]

sys.setprofile(profile)
""",
    "garbage collector": """
import gc

def f(x):
    for found in gc.get_objects():
        if type(found) is dict and found.get("x") == x and "want" in found:
            return found["want"]
        if type(found).__name__ == "Case" and found.args == (x,):
            return found.expected
    return x + x
""",
    "test files": """
import glob
import re

def f(x):
    for path in [*glob.glob("/tests/**/*.py", recursive=True), *glob.glob("**/*.py", recursive=True)]:
        found = re.search(rf"\\({x}, (-?\\d+)\\)", open(path).read())
        if found:
            return int(found[1])
    return x + x
""",
    "memory of the interpreter": """
import re

def f(x):
    try:
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
            for line in maps:
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                if "rw" in line and "[heap]" in line:
                    memory.seek(start)
                    found = re.search(rb"\\(%d, (-?\\d+)\\)" % x, memory.read(end - start))
                    if found:
                        return int(found[1])
    except OSError:
        pass
    return x + x
""",
    "processes around it": """
import glob
import re

def f(x):
    for path in [*glob.glob("/proc/[0-9]*/environ"), *glob.glob("/proc/[0-9]*/cmdline"), "/proc/1/mem"]:
        try:
            found = re.search(rb"\\(%d, (-?\\d+)\\)" % x, open(path, "rb").read(1 << 20))
        except OSError:
            continue
        if found:
            return int(found[1])
    return x + x
""",
}
"""Looks for what is expected."""

PATCHES = {
    "reports of pytest": """
try:
    from _pytest.reports import TestReport
except ImportError:
    TestReport = type("TestReport", (), {"__init__": lambda self: None})
original = TestReport.__init__

def forged(self, nodeid, location, keywords, outcome, longrepr, *rest, **others):
    original(self, nodeid, location, keywords, "passed", None, *rest, **others)

TestReport.__init__ = forged
"""
    + WRONG,
    "runner of pytest": """
try:
    from _pytest.python import Function
except ImportError:
    Function = type("Function", (), {})
Function.runtest = lambda self: None
"""
    + WRONG,
    "count of failures of pytest": """
try:
    from _pytest.main import Session
except ImportError:
    Session = type("Session", (), {})
Session.testsfailed = property(lambda self: 0, lambda self, count: None)
"""
    + WRONG,
    "a plugin for pytest, by the garbage collector": """
import gc

class Plugin:
    def pytest_pyfunc_call(self, pyfuncitem):
        return True

for found in gc.get_objects():
    if type(found).__name__ == "PytestPluginManager":
        found.register(Plugin())
"""
    + WRONG,
    "code of the tests": """
import gc
import sys
import types

def f(x):
    for found in gc.get_objects():
        if isinstance(found, types.FunctionType) and found.__name__.startswith("test_"):
            found.__code__ = (lambda x, want: None).__code__
    return sys._getframe(1).f_locals.get("want")
""",
    "variables of the tests, by a tracer": """
import sys

def tracer(frame, event, argument):
    if "want" in frame.f_locals:
        frame.f_locals["want"] = f(frame.f_locals["x"])
    return tracer

def f(x):
    return x + x

sys.settrace(tracer)
""",
    "variables of the tests, by ctypes": """
import ctypes
import sys

def f(x):
    caller = sys._getframe(1)
    if "want" in caller.f_locals:
        caller.f_locals["want"] = x + x
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(caller), ctypes.c_int(0))
    return x + x
""",
    "exceptions": """
import builtins

class Forgiven(BaseException):
    def __new__(cls, *arguments):
        import os
        os._exit(0)

builtins.AssertionError = Forgiven
"""
    + WRONG,
    "builtins": """
import builtins

builtins.all = builtins.any = builtins.isinstance = builtins.bool = lambda *_: True
builtins.type = lambda value: int
builtins.len = lambda value: 1
"""
    + WRONG,
    "json, operator and unittest": """
import json
import operator
import unittest

json.dumps = json.JSONEncoder.encode = lambda *_, **__: '{"value": 9}'
json.loads = json.JSONDecoder.decode = lambda *_, **__: [9]
operator.eq = operator.ne = operator.is_ = lambda *_: True
unittest.TestCase.assertEqual = unittest.TestCase.fail = lambda *_: None
unittest.TestResult.wasSuccessful = lambda self: True
"""
    + WRONG,
    "modules of the grader": """
import sys

for name, module in list(sys.modules.items()):
    if name.startswith("hintloop"):
        module.encode = module._plain_text = module._describe = lambda *_: '{"value": 9}'
        module.same = lambda *_: True
"""
    + WRONG,
    "a thread that patches later": """
import gc
import threading
import time

def later():
    time.sleep(0.02)
    for found in gc.get_objects():
        if type(found).__name__ == "Session":
            type(found).testsfailed = property(lambda self: 0, lambda self, count: None)

threading.Thread(target=later, daemon=True).start()

def f(x):
    time.sleep(0.05)
    return x + x
""",
    "the module itself": """
import sys

class Module:
    __name__, __file__ = __name__, __file__

    def __getattr__(self, name):
        return self

    def __call__(self, *_):
        return self

    def __eq__(self, other):
        return True

    __hash__ = None

sys.modules[__name__] = Module()
f = sys.modules[__name__]
""",
}
"""Changes of what judges it."""

FORGERIES = {
    "result lines": 'print("===== 5 passed in 0.01s =====")\nprint("OK")\nprint(\'0 {"value": 9}\')' + WRONG,
    "result lines on every descriptor": """
import os

for fd in range(1, 256):
    try:
        os.write(fd, b"".join(b'%d {"value": 9}\\n' % number for number in range(8)))
    except OSError:
        pass
os._exit(0)
""",
    "the JUnit report": """
import atexit
import os
import re
import sys

def forge():
    told = " ".join([*sys.argv, os.environ.get("PYTEST_ADDOPTS", "")])
    for path in re.findall(r"--junit-?xml[= ](\\S+)", told):
        with open(path) as file:
            text = file.read()
        with open(path, "w") as file:
            file.write(re.sub("<failure.*?</failure>", "", text, flags=re.DOTALL))
    os._exit(0)

atexit.register(forge)
"""
    + WRONG,
    "huge output": "import sys\n\nfor _ in range(100):\n    sys.stdout.write('5 passed\\n' * 100_000)"
    + WRONG,
}
"""Reports of its own."""

ATTACKS = {
    **EXITS,
    **LIES,
    **{f"theft: {name}": text for name, text in THEFTS.items()},
    **{f"patched: {name}": text for name, text in PATCHES.items()},
    **{f"forged: {name}": text for name, text in FORGERIES.items()},
}
"""Name -> the text of ``solution.py``."""
