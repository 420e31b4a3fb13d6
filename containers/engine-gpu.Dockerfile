# The image of an inference server on NVIDIA GPUs: vLLM's own image, and the worker extension.
#   docker build -t hintloop-engine-gpu -f containers/engine-gpu.Dockerfile .
ARG GPU_BASE=vllm/vllm-openai:v0.32.0
FROM ${GPU_BASE}
ARG PIP_INDEX_URL=
COPY containers/engine.txt /build/
RUN python3 -m pip install --no-cache-dir --no-deps -r /build/engine.txt
RUN install -d -o 65532 -g 65532 /data/run /data/run/weights
COPY agent /opt/src/hintloop/agent/
COPY containers/__init__.py containers/health.py /opt/src/hintloop/containers/
COPY replay /opt/src/hintloop/replay/
COPY rollout /opt/src/hintloop/rollout/
ENV PYTHONPATH=/opt/src \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python3", "-m", "hintloop.rollout.vllm_server"]
