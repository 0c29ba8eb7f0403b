"""From a checked config to a queued run."""
