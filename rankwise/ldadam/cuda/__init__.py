"""LDAdam's Triton kernels: moments of one stack, whole matrices where they lie (``grouped``), the step on shards."""
