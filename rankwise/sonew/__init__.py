"""This room holds SONew, the sparsified online Newton method (arXiv 2311.10085)."""
