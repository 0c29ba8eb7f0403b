"""Print the results of a search: python tools/search.py FOLDER"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import env

env.use_library()

from hpc.programs import search

if __name__ == "__main__":
    search.run()
