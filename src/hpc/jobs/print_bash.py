"""Print slurm.bash or pbs.bash, for scripts that people submit: source <(python -sPm hpc.jobs.print_bash NAME)."""

import sys
from pathlib import Path

if __name__ == "__main__":
    print(Path(__file__).with_name(sys.argv[1]).read_text(encoding="utf-8"), end="")
