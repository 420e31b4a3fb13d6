"""An exported folder on the Hugging Face Hub, as a data set repository.

The token comes from the environment variable ``HF_TOKEN`` and goes to the Hub alone. A repository that is made here
is private: recordings are of somebody's work.
"""

from __future__ import annotations

import os
from pathlib import Path

from hintloop.replay.export.hf import CARD, SUBSETS

TOKEN = "HF_TOKEN"
ENDPOINT = "HF_ENDPOINT"
_FILES = (CARD, *(f"{subset}/train.parquet" for subset in SUBSETS), "*.json")
"""All that an export writes; whatever else is in its folder stays here."""


class NotPushed(RuntimeError):
    """Nothing was pushed; the message says why, in one line."""


def push(folder: Path, repo: str) -> str:
    """Upload an exported folder to ``repo`` (``owner/name``) in one commit; its address. ``NotPushed``."""
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise NotPushed(f"pushing needs a token: set the environment variable {TOKEN}")
    if not any(file.is_file() for pattern in _FILES for file in folder.glob(pattern)):
        raise NotPushed(f"{folder} holds no export: it has neither {CARD} nor trajectories")
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise NotPushed("pushing needs the package huggingface_hub") from error
    # The HTTP client's own base class: which client that is depends on the version.
    of_client = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
    expected: tuple[type[BaseException], ...] = (of_client, HFValidationError, OSError, ValueError)
    hub = HfApi(endpoint=os.environ.get(ENDPOINT) or None, token=token)
    try:
        made = hub.create_repo(repo, repo_type="dataset", private=True, exist_ok=True)
        hub.upload_folder(
            folder_path=folder,
            repo_id=made.repo_id,
            repo_type="dataset",
            commit_message="Export of a hintloop journal",
            allow_patterns=list(_FILES),
        )
    except expected as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise NotPushed(f"the hub did not take it: {first.replace(token, '[token]')}") from error
    return str(made)
