"""Defaults of all keys of the groups cluster, strategy and trainer; Hydra finds them after a project's own configs."""
