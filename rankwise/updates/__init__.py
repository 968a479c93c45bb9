"""This room holds formulas that several rules share, as pure functions on tensors."""
