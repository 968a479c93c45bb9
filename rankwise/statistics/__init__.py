"""What MKOR learns of a model while it runs: hooks on linear layers, and their sums over ranks."""
