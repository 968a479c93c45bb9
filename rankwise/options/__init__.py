"""Values of options: checks, and messages that name key, value, rule and fix."""
