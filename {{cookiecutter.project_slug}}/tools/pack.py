"""Pack many small files into a large one, once, before jobs train on it:"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import env

env.use_library()

from hpc.programs import pack

if __name__ == "__main__":
    pack.run()
