"""What all of the learner's tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_search_through_the_libraries() -> Iterator[None]:
    """Each start of a trainer collects garbage; searching the libraries' objects would take a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """An empty bucket of a server on loopback, which the usual variables of the environment name."""
    server_of = pytest.importorskip("moto.server", reason="needs moto, of the extra dev")
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs, of the extra dev")
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir(f"traces-{port}")  # the servers of one process share their buckets
        yield f"s3://traces-{port}"
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()
