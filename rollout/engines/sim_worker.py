"""The worker of a simulated server: it holds the weights, and gets them in all the ways that a vLLM worker does."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from hintloop.rollout.engines.sim_model import SimModel
from hintloop.rollout.engines.sim_plan import Faults, Plan
from hintloop.rollout.vllm_extension import Fetcher, WorkerExtension, fetch, verify
from hintloop.rollout.vllm_sender import receive_files

BACKEND = "sim"
"""What its side of a weight transfer is called."""
RECEIVE_S = 60.0


class Refused(Exception):
    """The server answers with an HTTP error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class SimWorker(WorkerExtension):
    """Holds the weights, as a vLLM worker does."""

    def __init__(self, plan: Plan, faults: Faults, cache: Path, quit: Callable[[], None]) -> None:
        self.model = SimModel(vocabulary=plan.vocabulary)
        self.adapters: dict[str, SimModel] = {}
        self.broken = False
        self._plan = plan
        self._faults = faults
        self._quit = quit
        self._struck: str | None = None
        self._source: IO[bytes] | None = None
        self._updating = False
        self._received: SimModel | None = None
        self.hintloop_fetcher = Fetcher(partial(self._fetch, cache=cache))

    def hintloop_load(self, version: int) -> dict[str, Any]:
        """As in vLLM, with planned faults."""
        self._strike()
        if self._struck == "refuse_load":
            return {"ok": False, "intact": True, "error": "planned: the load was refused"}
        return super().hintloop_load(version)

    def hintloop_apply(self, folder: Path, version: int) -> None:
        """Take over the version in ``folder``."""
        if self._struck == "break_load" or self.broken:
            self.broken = True
            raise RuntimeError("planned: the load broke off")
        if self._struck != "stale_load":
            self.model = SimModel.of(folder)

    def hintloop_quit(self) -> dict[str, Any]:
        """End the server."""
        self._quit()
        return {"ok": True}

    # Adapters

    def load_adapter(self, name: str, path: str) -> None:
        """Let requests name the adapter of a version in ``path``. Raises ``Refused``."""
        self._strike()
        if name in self.adapters:
            raise Refused(400, f"The lora adapter '{name}' has already been loaded.")
        if self._struck in ("refuse_load", "break_load"):
            raise Refused(500, "planned: the adapter was refused")
        if not (Path(path) / "adapter_config.json").is_file():
            raise Refused(404, f"Loading lora {name} failed: No adapter found")
        found = SimModel.of(Path(path).parent, vocabulary=self._plan.vocabulary)
        self.adapters[name] = self.model if self._struck == "stale_load" else found

    def unload_adapter(self, name: str) -> None:
        """Let no request name it any more. Raises ``Refused``."""
        if self.adapters.pop(name, None) is None:
            raise Refused(404, f"The lora adapter '{name}' cannot be found.")

    # Weight transfer; all of it blocks, and raises ``Refused``

    def init_transfer(self, info: dict[str, Any]) -> None:
        """Meet the sender."""
        with socket.create_connection((info["address"], info["port"]), timeout=RECEIVE_S) as connection:
            self._source = connection.makefile("rb")

    def start_update(self) -> None:
        """From here on there is no way back."""
        self._strike()
        if self._updating or self._struck == "refuse_load":
            raise Refused(500, "an update goes on already" if self._updating else "planned: refused")
        self._updating = True

    def update(self, info: dict[str, Any]) -> None:
        """Receive a version."""
        try:
            if self._source is None or not self._updating:
                raise ConnectionError("nobody sends anything")
            with tempfile.TemporaryDirectory() as folder:
                receive_files(self._source, Path(folder))
                self._received = SimModel.of(Path(folder))
            if self._struck == "break_load":
                raise ConnectionError("planned: the transfer broke off")
        except (OSError, ValueError) as error:
            self.broken, self._updating = True, False
            raise Refused(500, str(error)) from error

    def finish_update(self) -> None:
        """Sample from what was received."""
        if self._received is None or not self._updating:
            raise Refused(500, "finish_weight_update called without a matching start_weight_update.")
        if self._struck != "stale_load":
            self.model = self._received
        self._updating, self._received = False, None

    def end_transfer(self) -> None:
        """Let go the sender."""
        if self._updating:
            raise Refused(500, "Cannot release a trainer connection during a weight update")
        self.close()

    def close(self) -> None:
        """Let go the sender, whatever goes on."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def _strike(self) -> None:
        fault = self._faults.strike("load")
        self._struck = fault.kind if fault else None

    def _fetch(self, uri: str, version: int, under: str, *, cache: Path) -> Path:
        time.sleep(self._plan.fetch_ms / 1e3)
        folder = fetch(uri, version, under, cache=cache)
        if self._faults.strike("fetch"):
            damaged = next(path for path in sorted(folder.rglob("*")) if path.suffix == ".safetensors")
            content = damaged.read_bytes()
            damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            verify(folder)
        return folder
