"""The journal and the environments run on machines without the torch stack."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORT_ALL = """
import importlib, pkgutil, sys

package = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    if not name.rpartition(".")[2].startswith("__"):
        importlib.import_module(name)
print(len(names), "torch" in sys.modules, "hintloop.learner" in sys.modules)
"""


@pytest.mark.parametrize("package", ["hintloop.replay", "hintloop.envs"])
def test_every_module_imports_without_torch(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, package], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    count, torch, learner = done.stdout.split()[-3:]
    assert int(count) > 0
    assert (torch, learner) == ("False", "False")
