"""Runs side by side, from whatever logs they left: what ``rankwise compare`` does."""
