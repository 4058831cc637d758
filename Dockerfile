# The service on an NVIDIA GPU (or, more slowly, without one).
#
#   docker build -t sdxl .
#   docker build -t sdxl --build-arg BACKENDS=tensorrt,tensorrt-rtx .
#   docker run --gpus all -p 127.0.0.1:8000:8000 sdxl --host 0.0.0.0 --insecure
#
# Weights, engines and keys are volumes; nothing else is written, so `--read-only --tmpfs /tmp` works.
# docs/operations.md says more, and serve/deploy/compose.yaml runs it with Prometheus and Grafana.

ARG CUDA=13.0.2
ARG BASE=nvidia/cuda:${CUDA}-runtime-ubuntu24.04

FROM ${BASE} AS python
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3.12 python3.12-venv libgomp1 make wget \
 && rm -rf /var/lib/apt/lists/*

FROM python AS build
# Extras of pyproject.toml: what can compute the networks besides PyTorch and ONNX Runtime.
ARG BACKENDS=tensorrt
WORKDIR /src
COPY pyproject.toml constraints.txt Makefile README.md LICENSE ./
COPY locks locks
COPY sdxl sdxl
COPY engines engines
COPY onnx_export onnx_export
COPY serve serve
COPY eval eval
# By hash: every file is the one that locks/ names, or the build fails (docs/operations.md).
RUN make setup PYTHON=python3.12 VENV=/opt/sdxl PACKAGE="'.[serve,export,${BACKENDS}]'" LOCKED=${BACKENDS}

# TensorRT-LLM pins another PyTorch: an interpreter of its own, with the same Python and Ray as the
# cluster, and of this repository what a replica imports. `--target llm` makes the image that has
# both; `sdxl serve --llm MODEL --llm-python /opt/trtllm/bin/python` uses it. It needs MPI.
FROM python AS llm-interpreter
ARG LLM_PACKAGES="tensorrt-llm==1.2.1"
RUN apt-get update \
 && apt-get install -y --no-install-recommends libopenmpi-dev openmpi-bin \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY sdxl sdxl
COPY engines engines
COPY onnx_export onnx_export
COPY serve serve
COPY eval eval
RUN python3.12 -m venv /opt/trtllm \
 && /opt/trtllm/bin/python -m pip install --no-cache-dir \
      "$(grep '^ray==' constraints.txt | sed 's/ray/ray[serve]/')" ${LLM_PACKAGES} \
 && /opt/trtllm/bin/python -m pip install --no-cache-dir --no-deps .

FROM python AS service
COPY --from=build /opt/sdxl /opt/sdxl
# Models from the hub and engines live below SDXL_HOME; weights of your own under /models.
ENV PATH=/opt/sdxl/bin:$PATH \
    SDXL_HOME=/var/lib/sdxl \
    HF_HOME=/var/lib/sdxl/hub \
    RAY_USAGE_STATS_ENABLED=0 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --no-create-home --home-dir /var/lib/sdxl sdxl \
 && mkdir -p /var/lib/sdxl/hub /models \
 && chown -R sdxl /var/lib/sdxl
USER 10001
WORKDIR /var/lib/sdxl
VOLUME ["/var/lib/sdxl", "/models"]
EXPOSE 8000
# /readyz needs no key. Real weights take minutes to load.
HEALTHCHECK --interval=10s --timeout=6s --start-period=15m --start-interval=2s \
  CMD ["python", "-c", "import urllib.request as web; web.urlopen('http://127.0.0.1:8000/readyz', timeout=5)"]
ENTRYPOINT ["sdxl", "serve"]
CMD ["--host", "0.0.0.0", "--keys", "/run/secrets/sdxl_keys"]

FROM service AS llm
USER root
RUN apt-get update \
 && apt-get install -y --no-install-recommends libopenmpi-dev openmpi-bin \
 && rm -rf /var/lib/apt/lists/*
USER 10001
COPY --from=llm-interpreter /opt/trtllm /opt/trtllm

FROM service
