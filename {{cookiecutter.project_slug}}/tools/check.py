"""Try a module and its data on this machine, in about a minute: python tools/check.py model=mine data=mine"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import env

env.use_library()

from hpc.programs import check

if __name__ == "__main__":
    check.run()
