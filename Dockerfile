# docker build -t wlb-titan . && docker run --gpus all --ipc host -v $PWD:/work wlb-titan train job.toml
# The CUDA of torch's wheels comes with them; the base brings ptxas and headers, which Triton and the compiler use.
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE}

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/wlb-titan PATH=/opt/wlb-titan/bin:$PATH
RUN python3 -m venv $VIRTUAL_ENV && pip install --no-cache-dir uv

# What seldom changes comes first, so that a changed line of the project installs nothing else again.
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY wlb_titan wlb_titan
COPY kernels kernels
COPY launch launch
COPY train_configs train_configs
RUN uv pip install --no-cache --compile-bytecode --constraint constraints.txt '.[kubernetes,solver]'

WORKDIR /work
ENTRYPOINT ["wlb-titan"]
