"""What a module, its data and its callbacks keep in attributes, and whether it has changed."""
