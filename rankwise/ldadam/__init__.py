"""LDAdam: Adam in a low-dimensional subspace that follows the gradient (arXiv 2410.16103)."""
