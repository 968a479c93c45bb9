"""The optimizers as torch.optim classes: state, param groups and calls into rankwise.updates."""
