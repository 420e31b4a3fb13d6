"""A run as Monarch actors on this host: what ``hintloop play`` does with processes. See README.md.

python examples/monarch/play.py --preset smoke --name actors
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hintloop.cli.actors import play
from hintloop.cli.config import load_config, preset_names
from hintloop.cli.errors import UserError, report_line
from hintloop.cli.play import new_run, old_run
from hintloop.cli.report import write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Play a new run, or go on with one, and print its report; the exit status."""
    options = _options(arguments)
    try:
        if options.resume:
            folder, config = old_run(options.resume)
        else:
            values = {"run.name": options.name} if options.name else {}
            config = load_config(preset=options.preset, assignments=options.set, values=values)
            folder, config = new_run(config, preset=options.preset)
        code = play(folder, config, say=print)
    except UserError as error:
        print(report_line(error), file=sys.stderr)
        return 2
    if code == 0:
        print(write_report(folder)[1])
    return code


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="play.py"
    )
    parser.add_argument("--preset", choices=preset_names(), default="smoke")
    parser.add_argument("--name", help="name of the run folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with a run")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
