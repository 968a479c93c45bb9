"""``rankwise compare`` puts runs side by side, from whatever logs they left."""
