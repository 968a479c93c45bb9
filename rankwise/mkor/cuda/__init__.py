"""MKOR's Triton kernels move factors in place, and precondition the gradients of many matrices at once."""
