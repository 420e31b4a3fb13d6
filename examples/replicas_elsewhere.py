"""Replicas of a learner as jobs at Hugging Face or as Modal sandboxes, from start to end.

They share a journal, a weight store and a folder of rounds by URIs that all of them reach; the image has hintloop with
the extras train and replicas. Secrets are given by name and taken from this environment. Example:

    hintloop config --preset laptop --set replicas.sync_every=50 > settings.toml
    python examples/replicas_elsewhere.py hf-jobs --image me/hintloop-app --config settings.toml --count 4 \\
        --store s3://bucket/run --hardware a10g-small --secret AWS_ACCESS_KEY_ID --secret AWS_SECRET_ACCESS_KEY
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hintloop.learner.executors.hf_jobs import HFJobsExecutor
from hintloop.learner.executors.modal_sandbox import ModalExecutor
from hintloop.learner.executors.protocol import ExecutorError, ReplicaSpec, ReplicaState
from hintloop.learner.executors.replica_entrypoint import ReplicaJob, command
from hintloop.learner.executors.run import run_replicas

EXECUTORS = {"hf-jobs": HFJobsExecutor, "modal": ModalExecutor}
SLACK_S = 600.0
"""More than the jobs' own limit: until they have started, and their ends are known."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them, print what they write and how each ended; the exit code, 0 when all succeeded."""
    options = _options(arguments)
    seconds = 3600.0 * options.hours
    specs = [
        ReplicaSpec(
            index,
            command(_job(options, index)),
            timeout_s=seconds,
            secrets=tuple(options.secret),
            hardware=options.hardware,
            volumes={options.run: options.volume} if options.volume else {},
        )
        for index in range(options.count)
    ]
    try:
        executor = EXECUTORS[options.executor](options.image)
        results = run_replicas(executor, specs, timeout_s=seconds + SLACK_S, together=True, say=print)
    except ExecutorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for result in results:
        print(f"replica {result.index}: {result.state} {result.error or ''}".rstrip())
    return int(any(result.state is not ReplicaState.SUCCEEDED for result in results))


def _job(options: argparse.Namespace, index: int) -> ReplicaJob:
    return ReplicaJob(
        index=index,
        count=options.count,
        run=options.run,
        config=options.config.read_text(),
        journal=f"{options.store}/journal",
        weights=f"{options.store}/weights",
        rounds=f"{options.store}/rounds",
        follow=options.follow,
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="replicas_elsewhere.py",
    )
    parser.add_argument("executor", choices=sorted(EXECUTORS))
    parser.add_argument("--image", required=True, help="image in a registry that the service reaches")
    parser.add_argument("--config", required=True, type=Path, help="settings as TOML")
    parser.add_argument("--store", required=True, help="URI under which journal, weights and rounds lie")
    parser.add_argument("--count", type=int, default=2, help="replicas")
    parser.add_argument("--hardware", help="flavor (hf-jobs) or GPU (modal); default: CPU")
    parser.add_argument("--hours", type=float, default=2.0, help="after which they are ended")
    parser.add_argument("--secret", action="append", default=[], help="name of a variable; may be repeated")
    parser.add_argument("--follow", action="store_true", help="wait for more at the end of the journal")
    parser.add_argument("--run", default="/data/run", help="run folder in the job")
    parser.add_argument("--volume", help="bucket or volume for the run folder: checkpoints survive the job")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
