"""The sender of a direct transfer against vLLM's own classes; real servers are in ``test_engine_conformance``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .vllm_process import python_path, tiny_model

NCCL = """
import inspect, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from vllm.distributed.weight_transfer import nccl_common, packed_tensor
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from hintloop.rollout.vllm_extension import iter_tensors
from hintloop.rollout.vllm_sender import DTYPES, NcclLink

assert all(isinstance(getattr(torch, name), torch.dtype) for name in DTYPES.values())
link = NcclLink()
info = nccl_common.NCCLWeightTransferInitInfo(**link.offer("127.0.0.1", 2))
assert (info.world_size, info.rank_offset, info.packed) == (3, 1, True)

met = []
nccl_common.stateless_init_process_group = lambda *place: met.append(place) or SimpleNamespace(device="cpu")
torch.accelerator.current_device_index = lambda: 0
link.join()  # vLLM's own trainer_init, but for the group itself
assert met == [(info.master_address, info.master_port, 0, 3, 0)]

told = link.describe(Path(sys.argv[1]))
NCCLWeightTransferUpdateInfo(**told)
produce, got = packed_tensor.packed_nccl_broadcast_producer, {}

def producer(**settings):  # vLLM's own packing and unpacking, but for the broadcast between them
    inspect.signature(produce).bind(**settings)
    size = settings["buffer_size_bytes"]
    assert size == info.packed_buffer_size_bytes and settings["num_buffers"] == info.packed_num_buffers
    kinds = [getattr(torch, name) for name in told["dtype_names"]]
    chunk = packed_tensor.pack_tensors(settings["iterator"], settings["post_iter_func"], size)
    got.update(packed_tensor.unpack_tensor(
        chunk.packed_tensor, told["names"], told["shapes"], kinds, chunk.tensor_sizes))

packed_tensor.packed_nccl_broadcast_producer = producer
link.send()
expected = dict(iter_tensors(Path(sys.argv[1])))
assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)
print("all", len(got))
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_the_sender_calls_vllm_as_it_wants_to_be_called(repository: Path, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    command = [os.environ["HINTLOOP_VLLM_PYTHON"], "-c", NCCL, str(tmp_path / "model")]
    env = os.environ | {"PYTHONPATH": python_path(tmp_path, repository)}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split()[-2:] == ["all", "24"]
