"""SONew: sparsified online Newton (arXiv 2311.10085)."""
