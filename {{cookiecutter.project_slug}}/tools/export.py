"""Write a run's weights as one file, which needs no hpc: python tools/export.py RUN_DIR OUT [--step N | --best]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import env

env.use_library()

from hpc.programs import export

if __name__ == "__main__":
    export.run()
