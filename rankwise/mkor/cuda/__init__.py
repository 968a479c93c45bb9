"""MKOR's Triton kernels: factors moved in place, and gradients preconditioned by them, many matrices at once."""
