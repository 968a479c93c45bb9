"""This room holds MKOR, which moves Kronecker factors by rank-1 updates (arXiv 2306.01685)."""
