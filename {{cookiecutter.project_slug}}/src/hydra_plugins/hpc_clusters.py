"""Hydra looks here for plugins: its own compose, in a notebook, finds the clusters that hpc ships, and ${layout:}."""

from hpc.config import sections as sections
from hpc.config.compose import ClusterSearchPath as ClusterSearchPath
