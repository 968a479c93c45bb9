"""Machinery of the kernels that all rooms share: element-wise passes, CUDA graphs, compiled and Triton sources."""
