# rankwise beside NVIDIA's PyTorch, whose torch, triton and NCCL stay:
#   docker build -t rankwise .
#   docker run --rm --gpus all --ipc=host rankwise rankwise doctor
ARG BASE=nvcr.io/nvidia/pytorch:25.06-py3
FROM ${BASE}
WORKDIR /opt/rankwise
COPY . .
# What the image has is not replaced; where it pins a torch that pip does not know, that one is kept.
RUN python -m pip freeze | grep -iE "^(torch|triton|numpy)==" > /tmp/kept.txt || true; \
    pip install --no-cache-dir --constraint /tmp/kept.txt ".[deepspeed,megatron,plots]"
WORKDIR /workspace
CMD ["rankwise", "doctor"]
