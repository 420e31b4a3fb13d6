"""Tiers of tests that need something a machine may lack, and where shared data lies.

A test of a tier is skipped, with the reason, where the resource is missing; it fails instead when the
environment variable ``HINTLOOP_REQUIRE`` (tiers, separated by commas) says that this machine has it. Slow
tests run only when they are asked for that way.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

settings.register_profile("hintloop", deadline=None, max_examples=50)  # a busy machine is no failure
settings.load_profile("hintloop")

ROOT = Path(__file__).parent.parent


def _lacks_docker() -> str | None:
    if importlib.util.find_spec("docker") is None:
        return "there is no client for Docker; pip install 'hintloop[docker]'"
    return _refused("image", "inspect", "--format", "{{.Id}}", "hintloop-sandbox")


def _lacks_compose() -> str | None:
    images = ("hintloop-sandbox", "hintloop-app", "hintloop-engine-cpu")
    return _refused("compose", "version") or _refused("image", "inspect", "--format", "{{.Id}}", *images)


def _refused(*words: str) -> str | None:
    """Why the ``docker`` command does not do something; None when it does."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    asked = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=120, check=False)
    return None if asked.returncode == 0 else f"docker {words[0]}: {asked.stderr.strip()[-200:]}"


def _lacks_vllm() -> str | None:
    python = os.environ.get("HINTLOOP_VLLM_PYTHON")
    if python is None:
        return "HINTLOOP_VLLM_PYTHON names no Python that has vLLM"
    return None if shutil.which(python) else f"HINTLOOP_VLLM_PYTHON: {python} is no program"


def _lacks_browser() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return None if shutil.which("chromium") else "there is no Chromium; apt install chromium"


def _lacks_gpu() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.accelerator.is_available() else "there is no accelerator"


def _lacks_time() -> str | None:
    return None if "slow" in _required() else "slow; HINTLOOP_REQUIRE=slow runs it"


TIERS: dict[str, Callable[[], str | None]] = {
    "docker": cache(_lacks_docker),
    "compose": cache(_lacks_compose),
    "vllm": cache(_lacks_vllm),
    "browser": cache(_lacks_browser),
    "gpu": cache(_lacks_gpu),
    "slow": _lacks_time,
}
"""Marker -> what is missing, or None."""


def _required() -> set[str]:
    return {name.strip() for name in os.environ.get("HINTLOOP_REQUIRE", "").split(",") if name.strip()}


def pytest_configure(config: pytest.Config) -> None:
    if unknown := _required() - TIERS.keys():
        raise pytest.UsageError(f"HINTLOOP_REQUIRE: no tier {', '.join(sorted(unknown))}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that none is left alone at the end while other workers have nothing to do."""
    items.sort(key=lambda item: "e2e" not in item.path.parts and item.get_closest_marker("vllm") is None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, missing in TIERS.items():
        if item.get_closest_marker(name) and (reason := missing()):
            if name in _required():
                pytest.fail(f"HINTLOOP_REQUIRE has {name}, but {reason}", pytrace=False)
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command under test points the log at its own stderr, which is closed when the test ends."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of third-party sample data; skips where there is none."""
    folder = Path(os.environ.get("HINTLOOP_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no shared data in {folder}; HINTLOOP_DATA names the folder")
    return folder


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
        s3fs.S3FileSystem().mkdir(f"bucket-{port}")  # the servers of one process share their buckets
        yield f"s3://bucket-{port}"
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()
