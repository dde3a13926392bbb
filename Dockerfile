# vitmha for CPUs, or with PyTorch from another index for GPUs:
#   docker build --tag vitmha .
#   docker build --tag vitmha:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# docs/guides/docker.md says how to run it.
FROM python:3.11-slim-bookworm AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# hadolint ignore=DL3013 # pyproject.toml has the ranges
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch torchvision
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "vitmha[serve] @ file://$(echo /wheels/*.whl)"

# Any user may write to the home directory and to /work, so that `docker run --user` works.
RUN useradd --create-home --uid 1000 vitmha && \
    mkdir /home/vitmha/.cache /work && \
    chmod 1777 /home/vitmha /home/vitmha/.cache /work
ENV HOME=/home/vitmha
USER 1000
WORKDIR /work
ENTRYPOINT ["vitmha"]
CMD ["--help"]
