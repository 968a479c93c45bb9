"""Files of states by parameter name, which any layout can be loaded from."""
