"""Measure the network between GPUs: python tools/comm.py trainer=ddp_4node [cluster=NAME] [key=value]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import env

env.use_library()

from hpc.programs import comm

if __name__ == "__main__":
    comm.run()
