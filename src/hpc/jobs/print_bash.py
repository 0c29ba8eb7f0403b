"""Print the functions of job scripts, for those that people submit: source <(python -sPm hpc.jobs.print_bash slurm)."""

import sys
from pathlib import Path

# What a script sources for each scheduler, in this order. Functions of a file exist only if bash could read all of it.
SOURCED_FILES = {
    "slurm": ("job.bash", "slurm.bash", "shared_node.bash"),
    "pbs": ("job.bash", "pbs.bash", "pbs_successor.bash"),
}

if __name__ == "__main__":
    for file in SOURCED_FILES[sys.argv[1].removesuffix(".bash")]:  # with it: scripts rendered until version 0.3
        print(Path(__file__).with_name(file).read_text(encoding="utf-8"), end="")
