"""Measure how training scales with the number of nodes: one job per number."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import env

env.use_library()

from hpc.programs import scale

if __name__ == "__main__":
    scale.run()
