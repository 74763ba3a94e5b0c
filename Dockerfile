# vlmrl with vLLM for NVIDIA GPUs. The first stage installs the locked packages with uv; the second adds what runs them.
# Build: docker build -t vlmrl .
# Run:   docker run --gpus all --ipc=host -v "$PWD:/work" -v "$HOME/.cache/huggingface:/root/.cache/huggingface" \
#          vlmrl train recipes/fungi_im.toml --gpus 6
# --ipc=host (or --shm-size=16g): ranks and engines hand tensors over in shared memory, of which a container has 64 MB.
# The second mount is the hub's cache: models are downloaded once, not into the container.
# Modules are compiled when they are installed: a container forgets at its end what Python compiles at the first import.
# CUDA is that of the locked torch (requirements-vllm.lock: nvidia-cuda-runtime).
FROM nvidia/cuda:13.0.2-runtime-ubuntu24.04 AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements-vllm.lock pyproject.toml README.md LICENSE ./
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir uv \
 && python3 -m venv /opt/vlmrl \
 && /opt/uv/bin/uv pip install --python /opt/vlmrl/bin/python --no-cache --no-deps --compile-bytecode -r requirements-vllm.lock
COPY vlmrl vlmrl
COPY recipes recipes
RUN /opt/uv/bin/uv pip install --python /opt/vlmrl/bin/python --no-cache --no-deps --compile-bytecode . \
 && /opt/vlmrl/bin/vlmrl --version

FROM nvidia/cuda:13.0.2-runtime-ubuntu24.04
# gcc and Python's headers: Triton compiles the launchers of its kernels when they first run, in torch and in vLLM.
# libcairo2 draws SVG. The fonts are in the package. The sandbox for a model's code (Landlock and a filter of system calls)
# needs no privileges. bubblewrap is its second layer in a container that may make namespaces: with the options
# --security-opt seccomp=unconfined --security-opt apparmor=unconfined.
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-dev gcc libc6-dev libcairo2 bubblewrap git \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/vlmrl /opt/vlmrl
COPY recipes /work/recipes
ENV PATH=/opt/vlmrl/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /work
ENTRYPOINT ["vlmrl"]
CMD ["--help"]
