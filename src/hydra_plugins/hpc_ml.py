"""Hydra looks here for plugins: its own compose, in a notebook, finds hpc's configs, and ${layout:}."""

from hpc.config import sections as sections
from hpc.config.compose import LibrarySearchPath as LibrarySearchPath
