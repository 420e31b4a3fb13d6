# The image of all services but the inference server: environment server, rollout, learner, view, scripted teacher, and
# the proxy before the Docker engine. From the root of the project:
#   docker build -t hintloop-app -f containers/app.Dockerfile .
# Nothing is taken from the network when containers/fetch-wheels app has filled containers/wheels/app (or the folder that
# WHEELS names) and BASE is on the engine. BASE needs Python 3.11; containers/base-image makes one without a registry.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS packages
ARG PIP_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=
ARG WHEELS=containers/wheels/app
COPY ${WHEELS} /wheels/
COPY containers/app.txt containers/install /build/
RUN sh /build/install /opt/hintloop -r /build/app.txt

FROM packages AS project
COPY pyproject.toml README.md LICENSE /build/
COPY agent /build/agent/
COPY cli /build/cli/
COPY containers/*.py containers/py.typed /build/containers/
COPY envs /build/envs/
COPY learner /build/learner/
COPY replay /build/replay/
COPY rollout /build/rollout/
RUN sh /build/install /opt/hintloop --no-build-isolation --prefix /project /build

FROM ${BASE}
RUN echo 'hintloop:x:65532:65532::/tmp:/bin/sh' >> /etc/passwd \
    && echo 'hintloop:x:65532:' >> /etc/group \
    && install -d -o 65532 -g 65532 /data/run /data/run/journal /data/run/weights /run/docker-proxy
COPY --from=packages /opt/hintloop /opt/hintloop
COPY --from=project /project /opt/hintloop
ENV PATH=/opt/hintloop/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TOKENIZERS_PARALLELISM=false \
    HINTLOOP_TRACEBACK=1
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["hintloop"]
CMD ["--help"]
