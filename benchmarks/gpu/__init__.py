"""What only a GPU can tell, measured by one command in sections that can be cut off and gone on with."""
