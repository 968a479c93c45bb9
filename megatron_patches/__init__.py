"""Home of the Megatron integration. Nothing is exported yet: today rankwise runs under DeepSpeed and plain PyTorch."""
