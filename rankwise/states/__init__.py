"""What optimizers keep of parameters: which states, in which types and groups, and where they lie."""
