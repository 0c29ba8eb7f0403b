"""Many runs from one command: sweeps, searches, scaling."""
