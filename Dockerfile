# Two stages: the first installs the locked packages with uv, the second is a CUDA runtime with nothing to compile.
# Build: docker build -t vlmrl .          Run: docker run --gpus all -v "$PWD:/work" vlmrl train recipes/digits_im.toml
FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04 AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements.lock pyproject.toml README.md LICENSE ./
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir uv \
 && python3 -m venv /opt/vlmrl \
 && /opt/uv/bin/uv pip install --python /opt/vlmrl/bin/python --no-cache --no-deps -r requirements.lock
COPY vlmrl vlmrl
COPY recipes recipes
RUN /opt/uv/bin/uv pip install --python /opt/vlmrl/bin/python --no-cache --no-deps . \
 && /opt/vlmrl/bin/vlmrl --version

FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04
# libcairo2 draws SVG (cairosvg); everything else works without it.
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 libcairo2 git \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/vlmrl /opt/vlmrl
ENV PATH=/opt/vlmrl/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /work
ENTRYPOINT ["vlmrl"]
CMD ["--help"]
