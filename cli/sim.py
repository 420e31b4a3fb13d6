"""The command that runs a simulated inference server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hintloop.cli.options import ReadyFile


def sim_engine(
    host: Annotated[str, typer.Option(help="Address to listen on; nobody is asked who he is.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 9000,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Speed and faults: a TOML or JSON file.")
    ] = None,
    faults: Annotated[bool, typer.Option(help="Whether the plan's faults happen.")] = True,
    seed: Annotated[int, typer.Option(help="Decides what is sampled for a request without a seed.")] = 0,
    ready_file: ReadyFile = None,
) -> None:
    """Serve a simulated vLLM: meaningless tokens, real weight versions, planned latencies and faults.

    Example: `hintloop sim-engine --port 9000 --plan faults.toml`
    """
    from hintloop.rollout.engines.sim_plan import Plan, load_plan
    from hintloop.rollout.engines.sim_server import serve
    from hintloop.rollout.vllm_extension import cache_folder

    chosen = load_plan(plan) if plan else Plan()
    if not faults:
        chosen = chosen.model_copy(update={"fault": ()})
    serve(chosen, cache=cache_folder(), host=host, port=port, seed=seed, ready_file=ready_file)
