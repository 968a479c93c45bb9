"""MARS: variance-reduced AdamW, Lion, Shampoo and Muon (arXiv 2411.10438, 2510.21800)."""
