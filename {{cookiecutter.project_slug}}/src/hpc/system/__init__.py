"""Files that may be damaged, the home directory, processes."""
