"""Real DeepSpeed, FSDP2, Megatron and torchtitan on ranks that may share a card, each beside one process."""
