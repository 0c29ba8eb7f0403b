"""Hydra looks here for plugins: its own compose, in a notebook, finds hpc's defaults, and ${layout:}."""

from hpc.config import defaults as defaults
