"""Report on runs: python report.py [RUN_DIR_OR_FOLDER ...]"""

import env

env.use_library()

from hpc.programs import report

if __name__ == "__main__":
    report.run()
