"""Where a process stands among its ranks, how ranks meet, what the links between nodes measure."""
