"""Images of tasks: built when they are missing, and made fit for a sandbox by one thin layer.

A sandbox's root is read-only and its working directory is a size-limited tmpfs, so the layer puts the directory's
content aside, for the runner to copy it from there. It also links the other common names to it.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass

from hintloop.envs.sandbox import layout
from hintloop.envs.sandbox.base import SandboxDead, SandboxSpec
from hintloop.envs.sandbox.docker_engine import Engine

REPOSITORY = "hintloop-prepared"
_WAIT = 1800.0
"""Seconds that a start may wait for images of other tasks."""
_LAYER = """\
FROM {image}
USER 0
RUN ["/bin/sh", "-c", "set -e; mkdir -p {workdir} {pristine}; cp -a {workdir}/. {pristine}; \
chmod -R a+rX {pristine}; for name in {names}; do \
if [ ! -e $name ] || [ x$(readlink $name) = x{usual} ]; then ln -sfn {workdir} $name; fi; done"]
"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An image that sandboxes can be made of."""

    image: str
    workdir: str
    env: dict[str, str]
    """What the image sets for every program."""


class Images:
    """The prepared images of one engine. Threads may share it."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._lock = threading.Lock()
        self._known: dict[str, Prepared] = {}

    def prepare(self, spec: SandboxSpec) -> Prepared:
        """The image that ``spec`` names. ``SandboxDead`` when it is neither here nor can be built."""
        assert spec.image is not None
        if not self._lock.acquire(timeout=_WAIT):
            raise SandboxDead(f"another image has been in the making for {_WAIT:g} s")
        try:
            if spec.image not in self._known:
                self._known[spec.image] = self._prepare(spec.image, spec.context)
            return self._known[spec.image]
        finally:
            self._lock.release()

    def _prepare(self, image: str, context: str | None) -> Prepared:
        found = self._engine.find_image(image)
        if found is None and context is not None:
            self._engine.build(image, folder=context)
            found = self._engine.find_image(image)
        if found is None:
            raise SandboxDead(f"the engine has no image {image!r}; docker pull {image}")
        config = found["Config"] or {}
        workdir = config.get("WorkingDir") or "/"
        if workdir == "/":  # there is no room to write in all of it
            workdir = layout.WORKSPACE
        if any(letter in workdir for letter in " \t'\"\\$"):
            raise SandboxDead(f"the image {image!r} has a working directory of an odd name: {workdir!r}")
        layer = _LAYER.format(
            image=found["Id"],
            workdir=workdir,
            pristine=layout.PRISTINE,
            usual=layout.WORKSPACE,
            names=" ".join(layout.WORKSPACE_NAMES),
        )
        tag = f"{REPOSITORY}:{hashlib.sha256(layer.encode()).hexdigest()[:24]}"
        if self._engine.find_image(tag) is None:
            self._engine.build(tag, dockerfile=layer)
        env = dict(line.split("=", 1) for line in config.get("Env") or [])
        return Prepared(tag, workdir, env)
