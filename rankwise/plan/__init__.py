"""What is found out once: units of a step, owners, costs."""
