"""LDAdam's Triton kernels serve moments of a stack, whole matrices where they lie (``grouped``), steps on shards."""
