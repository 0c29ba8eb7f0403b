"""What a strategy does to a network."""
