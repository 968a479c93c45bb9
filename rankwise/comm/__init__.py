"""What travels between ranks: matrices to their owners and back, edges of shards, sums over parameters."""
