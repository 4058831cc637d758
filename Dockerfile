# The service, the export, the build and the measurements, on an NVIDIA GPU (or, more slowly, without).
#
#   docker build -t sdxl .
#   docker build -t sdxl --build-arg BACKENDS=tensorrt,tensorrt-rtx .
#   docker build -t sdxl:llm --build-arg KIND=llm .             # with TensorRT-LLM beside it
#   docker run --gpus all -p 127.0.0.1:8000:8000 sdxl serve --host 0.0.0.0 --insecure
#   docker run --gpus all -v sdxl-state:/var/lib/sdxl -v ./models:/models sdxl export --model /models/sdxl
#
# Weights, engines and keys are volumes; nothing else is written, so `--read-only --tmpfs /tmp` works.
# docs/deploy.md goes through it, and serve/deploy/compose.yaml runs it with Prometheus and Grafana.

ARG CUDA=13.0.2
ARG BASE=nvidia/cuda:${CUDA}-runtime-ubuntu24.04
ARG LLM_BASE=nvcr.io/nvidia/tensorrt-llm/release:1.2.1
# gpu, or llm: what is below the service.
ARG KIND=gpu

# What is installed, for either.
FROM scratch AS source
WORKDIR /src
COPY pyproject.toml constraints.txt Makefile README.md LICENSE ./
COPY locks locks
COPY sdxl sdxl
COPY engines engines
COPY onnx_export onnx_export
COPY serve serve
COPY eval eval

FROM ${BASE} AS gpu

# TensorRT-LLM pins another PyTorch, and NVIDIA's image has both. Beside them comes an environment with
# the cluster's own Ray and, of this repository, what a replica imports. NVIDIA's search path for
# libraries is for its own PyTorch alone; the service's must not find them.
FROM ${LLM_BASE} AS llm
ENV PIP_CONSTRAINT=
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3.12-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY --from=source /src ./
RUN python3.12 -m venv --system-site-packages /opt/trtllm/own \
 && /opt/trtllm/own/bin/python -m pip install --no-cache-dir --require-hashes -r locks/llm.txt \
 && /opt/trtllm/own/bin/python -m pip install --no-cache-dir --no-deps . \
 && mkdir /opt/trtllm/bin \
 && printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec /opt/trtllm/own/bin/python "$@"\n' "$LD_LIBRARY_PATH" > /opt/trtllm/bin/python \
 && chmod 755 /opt/trtllm/bin/python
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64

# Triton compiles a launcher for each kernel: without engines, PyTorch on a GPU needs gcc and headers.
FROM ${KIND} AS python
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3.12 python3.12-venv python3.12-dev gcc libc6-dev libgomp1 make wget \
 && rm -rf /var/lib/apt/lists/*

FROM python AS build
# Extras of pyproject.toml: what can compute the networks besides PyTorch and ONNX Runtime.
ARG BACKENDS=tensorrt
WORKDIR /src
COPY --from=source /src ./
# By hash: every file is the one that locks/ names, or the build fails (docs/operations.md).
RUN make setup PYTHON=python3.12 VENV=/opt/sdxl PACKAGE="'.[serve,export,eval,c2pa,s3,${BACKENDS}]'" LOCKED=${BACKENDS}

FROM python AS service
COPY --from=build /opt/sdxl /opt/sdxl
# Models from the hub and engines live below SDXL_HOME; weights of your own under /models.
ENV PATH=/opt/sdxl/bin:$PATH \
    SDXL_HOME=/var/lib/sdxl \
    HF_HOME=/var/lib/sdxl/hub \
    TRITON_CACHE_DIR=/var/lib/sdxl/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/lib/sdxl/inductor \
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
# Any command of `sdxl`: serve unless another one is given.
ENTRYPOINT ["sdxl"]
CMD ["serve", "--host", "0.0.0.0", "--keys", "/run/secrets/sdxl_keys"]
