"""``hintloop traces replay``: teachers are asked at the states of recordings, and their pairs go into the journal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hintloop.cli.errors import UserError
from hintloop.cli.options import AsJson, Assignments, ConfigFile, Preset
from hintloop.cli.recordings import JournalUri

if TYPE_CHECKING:
    from hintloop.cli.config import TeachersSection
    from hintloop.replay.journal import Journal
    from hintloop.rollout.config import TeachersConfig, TeacherSpec
    from hintloop.rollout.recorded_pairs import History, Replayed, Settled
    from hintloop.rollout.teaching import Asking

Teachers = Annotated[
    list[str],
    typer.Option(
        "--teachers",
        metavar="NAME",
        help="Teacher of the settings (teachers.teachers), or claude, gpt, gemini by OpenRouter; may be repeated.",
    ),
]


def replay_traces(
    journal: JournalUri,
    teachers: Teachers,
    budget: Annotated[
        float,
        typer.Option("--budget", metavar="USD", min=0, help="For all that is ever asked there, US dollars."),
    ],
    state: Annotated[
        Path | None,
        typer.Option("--state", help="Folder of answers and ledger; default: JOURNAL.teachers, beside it."),
    ] = None,
    max_history_tokens: Annotated[
        int | None, typer.Option(min=1, help="Show teachers the opening and the end of a longer transcript.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Whose tokens these are; without it four characters are one."),
    ] = None,
    preset: Preset = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Ask nothing; say what it may cost at worst.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Ask teachers what they would have done in recorded turns, and add the pairs to the journal.

    The settings of `teachers` say which turns (`ask`, `ask_probability`, `max_asks_per_episode`) and how many must
    agree. Stopped or killed, the same command goes on where it was. Then tokenise the journal, also once more: its
    new episodes hold the pairs. Example:
    `hintloop traces replay --journal runs/recorded --teachers claude --teachers gpt --budget 5 --dry-run`
    """
    from hintloop.cli.config import load_config
    from hintloop.replay.journal import Journal
    from hintloop.rollout.recorded_pairs import History

    settings = load_config(preset=preset, file=config, assignments=assignments or ()).teachers
    chosen = _chosen(settings, teachers, budget)
    source = Journal(journal)
    folder = state or _beside(source)
    history = History(max_history_tokens, _counter(tokenizer) if tokenizer else None)
    if dry_run:
        _estimate(source, chosen, folder, history, budget, as_json=as_json)
    else:
        _replay(source, chosen, folder, history, as_json=as_json)


def _chosen(settings: TeachersSection, names: list[str], budget: float) -> TeachersConfig:
    from hintloop.rollout.config import TeachersConfig
    from hintloop.rollout.replay_api import DEFAULT_TEACHERS

    known: dict[str, TeacherSpec] = {spec.name: spec for spec in (*DEFAULT_TEACHERS, *settings.teachers)}
    wanted = [name for group in names for name in group.split(",") if name]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise UserError(f"no teacher {', '.join(unknown) or 'named'}; there are {', '.join(known)}")
    if settings.verify != "none":
        raise UserError("teachers.verify needs an environment, which a recording has not; set it to none")
    values = {name: getattr(settings, name) for name in TeachersConfig.model_fields}
    specs = tuple(known[name] for name in dict.fromkeys(wanted))
    return TeachersConfig(**{**values, "teachers": specs, "budget_usd": budget})


def _beside(journal: Journal) -> Path:
    from hintloop.replay.storage import Store

    store = Store(journal.uri)
    if not store.is_local:
        raise UserError("this journal is on no local disk: give a --state folder for answers and ledger")
    return Path(f"{store.root}.teachers")


def _counter(model: str) -> Callable[[str], int]:
    from hintloop.agent.policy import load_renderer
    from hintloop.cli.model import find_model

    tokenizer = load_renderer(find_model(model)).tokenizer
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _estimate(
    journal: Journal, chosen: TeachersConfig, folder: Path, history: History, budget: float, *, as_json: bool
) -> None:
    from hintloop.cli.output import show, show_json
    from hintloop.rollout.answer_cache import AnswerCache
    from hintloop.rollout.recorded_pairs import estimate
    from hintloop.rollout.teaching import answers_folder, rule_of

    cache = AnswerCache(answers_folder(folder), max_bytes=int(chosen.cache_mb * 1e6))
    found, rows = estimate(
        journal,
        rule_of(chosen),
        chosen.teachers,
        _settled(folder, chosen),
        cache,
        attempts=chosen.attempts,
        history=history,
    )
    usd, worst = (sum(row[name] for row in rows) for name in ("usd", "worst_usd"))
    if as_json:
        show_json(
            {"found": asdict(found), "teachers": rows, "usd": usd, "worst_usd": worst, "budget_usd": budget}
        )
        return
    show([{"what": name, "count": count} for name, count in asdict(found).items()], as_json=False)
    show(rows, as_json=False)
    verdict = "covers" if usd <= budget else "does not cover"
    typer.echo(
        f"at worst {usd:.2f} USD when every question is asked once, {worst:.2f} USD with all retries; "
        f"the budget of {budget:.2f} USD {verdict} the former"
    )


def _replay(
    journal: Journal, chosen: TeachersConfig, folder: Path, history: History, *, as_json: bool
) -> None:
    from hintloop.cli.output import show, show_json
    from hintloop.rollout.recorded_pairs import replay, room_for
    from hintloop.rollout.teaching import open_asking

    async def run() -> tuple[Replayed, Asking]:
        async with AsyncExitStack() as stack:
            asking = await open_asking(chosen, None, folder, stack)
            if asking is None:
                raise UserError("teachers.max_asks_per_episode is 0, so nothing is asked")
            with _progress(asking) as advance:
                done = await replay(
                    journal,
                    asking,
                    _settled(folder, chosen),
                    history=history,
                    in_flight=room_for(chosen),
                    progress=advance,
                )
            return done, asking

    done, asking = asyncio.run(run())
    told = {**asdict(done), **asking.snapshot()}
    if as_json:
        show_json(told)
        return
    counts = asking.counts
    rows = {
        **asdict(done.found),
        **{name: getattr(counts, name) for name in ("asked_turns", "answers", "cached", "disagreed", "same")},
        "no_answer": sum(counts.errors.values()),
        "over_budget": counts.over_budget,
        "pairs": counts.pairs,
    }
    show([{"what": name, "count": count} for name, count in rows.items()], as_json=False)
    values = [{"reason": reason, **value} for reason, value in told["by_reason"].items()]
    if values:
        show(values, as_json=False)
    typer.echo(
        f"{counts.cost_usd:.4f} USD; {counts.pairs} pairs in {done.supplements} new episodes of {journal.uri}"
        + ("; stopped, as the budget does not cover the next question" if done.stopped == "budget" else "")
    )


def _settled(folder: Path, chosen: TeachersConfig) -> Settled:
    from hintloop.rollout.recorded_pairs import Settled

    return Settled(folder / "settled.txt", chosen.teachers, chosen.agree)


@contextmanager
def _progress(asking: Asking) -> Iterator[Callable[[int], None]]:
    """How much has been asked, on stderr when that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns: Any = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task, asked = shown.add_task("asking"), 0

        def advance(count: int) -> None:
            nonlocal asked
            asked += count
            spent = asking.ledger.spent_usd if asking.ledger is not None else 0.0
            shown.update(task, description=f"{asked} turns asked about, {spent:.4f} USD spent")

        yield advance
