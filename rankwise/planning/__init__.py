"""What a step works on, planned once: parameters and their rules, units, owners, and where states lie."""
