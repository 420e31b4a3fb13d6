"""Checking many tasks at once, with progress, and how the findings are shown."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict

from rich.console import Console
from rich.progress import Progress

from hintloop.cli.output import show_json, table
from hintloop.envs.check import MANIFEST, Finding, check_task
from hintloop.envs.registry import get_task
from hintloop.envs.sandbox.providers import open_provider
from hintloop.envs.task import Task

MAX_SHOWN = 40
"""Failed checks that the table lists."""


def load(task_ids: Sequence[str]) -> tuple[list[Task], list[Finding]]:
    """The tasks that can be read, and a failed check for each other. ``KeyError`` for an id that is not known."""
    tasks: list[Task] = []
    unreadable: list[Finding] = []
    for task_id in task_ids:
        try:
            tasks.append(get_task(task_id))
        except ValueError as error:
            unreadable.append(Finding(task_id, MANIFEST, False, str(error)))
    return tasks, unreadable


def check_all(tasks: Sequence[Task], *, sandbox: str, times: int, jobs: int) -> list[Finding]:
    """The findings of every task, in the order of the tasks. ``ValueError`` for an unknown sandbox, ``SandboxDead``."""
    provider = open_provider(sandbox, pool=jobs)
    try:
        with (
            Progress(console=Console(stderr=True), transient=True) as progress,
            ThreadPoolExecutor(jobs) as pool,
        ):
            bar = progress.add_task("checking", total=len(tasks))
            futures = [pool.submit(check_task, provider, task, times=times) for task in tasks]
            for done in as_completed(futures):
                progress.advance(bar)
                if done.exception() is not None:
                    pool.shutdown(cancel_futures=True)
                    break
            return [finding for future in futures for finding in future.result()]
    finally:
        provider.close()


def show_findings(findings: Sequence[Finding], *, as_json: bool) -> None:
    """A row per check with how many tasks pass it, then what failed."""
    if as_json:
        show_json([asdict(finding) for finding in findings])
        return
    checks = dict.fromkeys(finding.check for finding in findings)
    rows = []
    for check in checks:
        of_check = [finding for finding in findings if finding.check == check]
        rows.append({"check": check, "tasks": len(of_check), "passed": sum(f.passed for f in of_check)})
    console = Console()
    console.print(table(rows))
    failed = [finding for finding in findings if not finding.passed]
    if failed:
        shown = [{"task": f.task_id, "check": f.check, "why": f.detail} for f in failed[:MAX_SHOWN]]
        console.print(table(shown))
    if len(failed) > MAX_SHOWN:
        console.print(f"and {len(failed) - MAX_SHOWN} more; --json has all")
