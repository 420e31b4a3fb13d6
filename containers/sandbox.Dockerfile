# The image of a sandbox: Python with pytest, a shell and git, nothing set-uid, a user without rights.
#   docker build -t hintloop-sandbox -f containers/sandbox.Dockerfile containers
# Without a registry: containers/base-image makes a base, to be named with --build-arg BASE=hintloop-base.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
RUN command -v git >/dev/null \
    || (apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*)
RUN python3 -c 'import pytest' 2>/dev/null || python3 -m pip install --no-cache-dir --root-user-action=ignore pytest
RUN command -v python >/dev/null || ln -s "$(command -v python3)" /usr/local/bin/python
RUN echo 'agent:x:65532:65532::/workspace:/bin/sh' >> /etc/passwd \
    && echo 'agent:x:65532:' >> /etc/group \
    && find / -xdev -type f -perm /6000 -exec chmod a-s {} + \
    && mkdir -p /workspace \
    && for name in /app /testbed /repo; do [ -e "$name" ] || ln -s /workspace "$name"; done
WORKDIR /workspace
USER 65532:65532
