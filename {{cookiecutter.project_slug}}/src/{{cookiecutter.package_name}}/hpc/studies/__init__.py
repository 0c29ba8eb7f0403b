"""Many jobs from one command: sweeps, searches, scaling."""
