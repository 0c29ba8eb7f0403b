"""Write the file of this cluster: python tools/cluster.py NAME [--job] [--partition P] [--gpu TYPE] [--compare]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import env

env.use_library()

from hpc.programs import cluster

if __name__ == "__main__":
    cluster.run()
