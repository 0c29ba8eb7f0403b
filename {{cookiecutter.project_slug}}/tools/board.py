"""Show curves in a browser: python tools/board.py [RUN_DIR_OR_FOLDER ...] [cluster=NAME]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import env

env.use_library()

from hpc.programs import board

if __name__ == "__main__":
    board.run()
