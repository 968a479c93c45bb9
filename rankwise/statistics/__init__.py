"""MKOR learns here of a running model, by hooks on linear layers and sums over ranks."""
