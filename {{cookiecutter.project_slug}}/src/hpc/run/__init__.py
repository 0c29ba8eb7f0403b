"""The life of a run: its directory, who may write, signals, watchdog, history."""
