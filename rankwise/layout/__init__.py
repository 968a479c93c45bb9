"""Which ranks hold which elements of a parameter: shards, cuts, blocks, and what frameworks say of them."""
