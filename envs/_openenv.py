"""OpenEnv's server and client classes, imported without its web page.

OpenEnv imports Gradio whether the page is wanted or not, which costs every process six seconds of CPU and
110 MB. It works without, so Gradio is hidden from that one import; the page still loads when it is asked for.
"""

from __future__ import annotations

import sys

_HIDE = "gradio" not in sys.modules and "openenv.core" not in sys.modules
if _HIDE:
    sys.modules["gradio"] = None  # type: ignore[assignment]
try:
    from openenv.core.client_types import StepResult
    from openenv.core.env_client import EnvClient
    from openenv.core.env_server import Action, ConcurrencyConfig, Environment, Observation, State, create_app
    from openenv.core.env_server.types import EnvironmentMetadata
finally:
    if _HIDE:
        del sys.modules["gradio"]

__all__ = [
    "Action",
    "ConcurrencyConfig",
    "EnvClient",
    "Environment",
    "EnvironmentMetadata",
    "Observation",
    "State",
    "StepResult",
    "create_app",
]
