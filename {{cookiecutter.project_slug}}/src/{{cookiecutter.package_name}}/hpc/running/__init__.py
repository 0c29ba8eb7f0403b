"""The life of a run's processes: begun, recorded, watched, ended, and why."""
