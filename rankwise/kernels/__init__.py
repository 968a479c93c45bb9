"""This room holds the kernels that several rules share: element-wise passes, 8-bit codes, Newton-Schulz products."""
