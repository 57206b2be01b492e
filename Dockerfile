# Image with the package for NVIDIA GPUs. No test builds it.
#
#   docker build -t bert-pretrain .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" bert-pretrain run tiny 'corpus/*.txt.gz' --output runs/tiny
#
# The wheels of torch on PyPI contain the CUDA libraries, so the base image needs none. The host needs a driver that is
# new enough for torch's CUDA. Triton, which compiles the kernels of torch.compile, needs a C compiler and Python.h.
ARG BASE=nvidia/cuda:12.8.1-base-ubuntu24.04
FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv python3-dev gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH HF_HOME=/work/.cache/huggingface
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[chinese,plot,tensorboard,finetune,cluster,http]"
WORKDIR /work
ENTRYPOINT ["bert-pretrain"]
