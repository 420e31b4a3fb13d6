"""Inside vLLM: its side of the simulated transfer. vLLM has no transfer of its own that works on a CPU.

``--worker-extension-cls sim_transfer.Extension --weight-transfer-config '{"backend": "sim"}'``
"""

from __future__ import annotations

import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (  # type: ignore[import-not-found]
    WeightTransferEngineFactory,
)

from hintloop.rollout.vllm_extension import WorkerExtension, iter_tensors, repack_tied_heads
from hintloop.rollout.vllm_sender import receive_files


@dataclass
class Init(WeightTransferInitInfo):  # type: ignore[misc]
    address: str
    port: int
    world_size: int


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class Engine(WeightTransferEngine):  # type: ignore[misc]
    init_info_cls = Init
    update_info_cls = Update
    source: IO[bytes] | None = None

    def init_transfer_engine(self, info: Init) -> None:
        with socket.create_connection((info.address, info.port), timeout=60) as connection:
            self.source = connection.makefile("rb")

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self.model)

    def receive_weights(self, info: Update) -> None:
        assert self.source is not None
        with tempfile.TemporaryDirectory() as folder:
            receive_files(self.source, Path(folder))
            found = dict(iter_tensors(Path(folder)))
            assert [list(found[name].shape) for name in info.names] == info.shapes
            self.model.load_weights(iter(found.items()))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_heads(self.model)

    def shutdown(self) -> None:
        if self.source is not None:
            self.source.close()
            self.source = None


class Extension(WorkerExtension):
    """Registers the engine where it is imported, which is in each worker."""


_registered: Any = WeightTransferEngineFactory.register_engine("sim", Engine)
