"""The unit tests of DeepSpeed, Megatron and torch, with our optimizers where Adam was."""
