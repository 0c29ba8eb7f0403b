"""What became of a run, in the terminal and as a page."""
