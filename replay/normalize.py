"""Which preference pairs are fit for training: data-juicer's filters and deduplicators, run by its own executor.

A pair is judged by two texts: ``text`` is the chosen action, ``whole`` all of the pair. An action is executed as it
stands, so a recipe may drop pairs and may not change them.

data-juicer is optional and runs in a process of its own, by the Python that ``HINTLOOP_DATA_JUICER_PYTHON`` names,
else by this one. It would install what it misses while it runs; it is kept from that.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hintloop.replay import data_juicer_worker

PYTHON = "HINTLOOP_DATA_JUICER_PYTHON"
DEFAULT_RECIPE: tuple[Mapping[str, Mapping[str, Any]], ...] = (
    {"text_length_filter": {"min_len": 2, "max_len": 20_000}},
    {"words_num_filter": {"min_num": 1, "max_num": 4_000}},
    {"special_characters_filter": {"max_ratio": 0.8}},
    {"document_deduplicator": {"text_key": "whole"}},
)
"""Steps of data-juicer, each with its options. Code has many special characters; text with hardly others is junk."""
PASSTHROUGH = "passthrough"
_STATS = "__dj__stats__"
_NO_INSTALLS = {"UV_OFFLINE": "1", "PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1"}
_ERROR_CHARS = 600


class Pair(Protocol):
    """A preference pair; ``hintloop.rollout.replay_api.DPOPair`` is one."""

    def row(self) -> dict[str, Any]:
        """As TRL's preference format has it, conversational: ``prompt``, ``chosen`` and ``rejected``."""


class NormalizerFailed(RuntimeError):
    """data-juicer is not there, or did not do its work; the message says why."""


@dataclass(frozen=True, slots=True)
class NormalizedDPOPair:
    """A pair that passed, and what it passed."""

    pair: Pair
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """``normalizer`` is ``data-juicer`` or ``passthrough``; of the former also ``version``, ``steps`` and the pair's
    own ``stats``."""

    def row(self) -> dict[str, Any]:
        """The pair's row, with the metadata as JSON text."""
        return {**self.pair.row(), "metadata": json.dumps(self.metadata, sort_keys=True)}


@dataclass(frozen=True, slots=True)
class DJNormalizer:
    """Runs a recipe; ``normalize`` may be called from any thread."""

    recipe: Path | Sequence[Mapping[str, Mapping[str, Any]]] = DEFAULT_RECIPE
    """Steps, or a data-juicer configuration file; its input and output are set here."""
    passthrough: bool = False
    """Take all pairs as they are, and say so in their metadata."""
    python: str | None = None
    """Interpreter that has data-juicer; None: as the module says."""
    timeout_s: float = 3600.0

    def normalize(self, pairs: Sequence[Pair]) -> list[NormalizedDPOPair]:
        """The pairs that pass, in their order. ``NormalizerFailed``, also for a recipe that changes a text."""
        if self.passthrough:
            return [NormalizedDPOPair(pair, {"normalizer": PASSTHROUGH}) for pair in pairs]
        if not pairs:
            return []
        with tempfile.TemporaryDirectory(prefix="hintloop-normalize-") as folder:
            samples = [_sample(number, pair.row()) for number, pair in enumerate(pairs)]
            told, kept = self._run(Path(folder), samples)
        about = {"normalizer": "data-juicer", **told}
        return [
            NormalizedDPOPair(pairs[number], {**about, "stats": stats})
            for number, stats in sorted(_unchanged(kept, samples).items())
        ]

    def _run(
        self, folder: Path, samples: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        source, target, report = folder / "in.jsonl", folder / "out" / "out.jsonl", folder / "report.json"
        source.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
        if isinstance(self.recipe, Path):
            config = self.recipe.absolute()
        else:
            config = folder / "recipe.yaml"  # JSON is YAML
            config.write_text(json.dumps({"process": list(self.recipe)}), encoding="utf-8")
        options = {
            "dataset_path": source,
            "export_path": target,
            "work_dir": target.parent,
            "np": 1,
            "use_cache": "false",
            "keep_stats_in_res_ds": "true",
        }
        flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        python = self.python or os.environ.get(PYTHON) or sys.executable
        worker = shutil.copy(
            data_juicer_worker.__file__, folder
        )  # a script's folder is where it imports from first
        _call([python, str(worker), str(report), str(config), *flags], folder, self.timeout_s)
        return json.loads(report.read_text(encoding="utf-8")), list(_lines(target))


def _sample(number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    whole = json.dumps([row["prompt"], row["chosen"], row["rejected"]], sort_keys=True)
    return {"number": number, "text": "\n".join(map(_text, row["chosen"])), "whole": whole}


def _text(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return " ".join(filter(None, [message["content"], *(f"{c['name']} {c['arguments']}" for c in calls)]))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The samples that are left; without any there may be no file."""
    if path.exists():
        with path.open(encoding="utf-8") as file:
            yield from (json.loads(line) for line in file if line.strip())


def _unchanged(
    kept: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
    """The stats of what was kept, by number."""
    found = {}
    for each in kept:
        number = each.get("number")
        if not isinstance(number, int) or any(
            each[name] != samples[number][name] for name in ("text", "whole")
        ):
            raise NormalizerFailed("the recipe changes texts; it may only hold filters and deduplicators")
        stats = each.get(_STATS) or {}
        found[number] = {name: value for name, value in stats.items() if value is not None}
    return found


def _call(command: Sequence[str], folder: Path, timeout_s: float) -> None:
    """Run to the end, with all that it starts gone afterwards."""
    log = folder / "log.txt"
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **_NO_INSTALLS},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        except OSError as error:
            raise NormalizerFailed(f"cannot start {command[0]}: {error.strerror}") from error
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise NormalizerFailed(f"data-juicer did not end within {timeout_s:g} s") from None
        finally:
            _end(process)
    said = log.read_text(encoding="utf-8", errors="replace").strip()[-_ERROR_CHARS:]
    if status == data_juicer_worker.MISSING:
        raise NormalizerFailed(
            f"{command[0]} cannot import data-juicer ({said}); install it there, name another Python by {PYTHON}, "
            "or take the pairs as they are with passthrough"
        )
    if status != 0:
        raise NormalizerFailed(f"data-juicer failed: {said}")


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()
