"""Runs data-juicer on one file: ``python data_juicer_worker.py REPORT CONFIG [--option value ...]``.

A program of its own that needs nothing but data-juicer, so that it also runs where hintloop is not installed:
data-juicer pins packages, sets up logging and changes process-wide settings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

MISSING = 3
"""Exit status when there is no data-juicer, or not all that it needs."""


def main(arguments: Sequence[str]) -> int:
    """Exit status 0 after its executor has written the result; REPORT then says what ran."""
    report, config, *options = arguments
    try:
        configs, core = import_module("data_juicer.config"), import_module("data_juicer.core")
    except ImportError as error:
        print(error, file=sys.stderr)
        return MISSING
    settings = configs.init_configs(["--config", config, *options])
    steps = [name for step in settings.process for name in step]
    core.DefaultExecutor(settings).run(skip_return=True)
    told = {"version": version("py-data-juicer"), "steps": steps}
    Path(report).write_text(json.dumps(told), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
