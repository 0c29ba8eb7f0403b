"""Execute a printed job script as its scheduler would, with stubs for all that it starts."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

from trial.hostile.case import Ground

JOBS = Path(__file__).resolve().parents[3] / "src/hpc/jobs"
BASH = shutil.which("bash") or "bash"
# Scheduler commands and waiting do nothing, and env.sh is not sourced. The common *.bash files come from the library,
# as a script that was only printed has no copy of the code.
STUBS = """
source() { case $1 in /dev/fd/*) builtin source <(cat JOBS) ;; esac; }
sleep() { read -rt 0.01 <>/dev/zero || :; }; module() { :; }
for name in srun scontrol squeue sacct sbatch qsub qstat pbs_tmrsh mpiexec aprun ip; do eval "$name() { :; }"; done
"""


def flaw(text: str, ground: Ground, environ: dict[str, str]) -> str:
    """Return "" if a job script is valid bash and adds no option of the scheduler. It is executed for a second."""
    file = ground.open / "job.sh"
    file.write_text(text)
    if not text.startswith("#!/bin/bash"):
        return ""  # --cfg, --help
    if subprocess.run([BASH, "-n", str(file)], capture_output=True).returncode or "--uid" in text.replace("\\n", ""):
        return "damaged script"
    names = ("job", "pbs", "pbs_successor") if "\n#PBS " in text else ("job", "slurm")
    (ground.open / "stubs").write_text(STUBS.replace("JOBS", shlex.join(f"{JOBS / name}.bash" for name in names)))
    (ground.open / "nodes").write_text("n1\n")
    sound = {
        "PATH": "/usr/bin:/bin",
        "BASH_ENV": str(ground.open / "stubs"),
        "HOME": str(ground.open / "home"),
        "TMPDIR": str(ground.open),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NUM_NODES": "1",
        "PBS_JOBID": "1.s",
        "PBS_NODEFILE": str(ground.open / "nodes"),
        "PBS_O_WORKDIR": str(ground.open),
    }
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    bash = subprocess.Popen([BASH, str(file)], env=sound | environ, cwd=ground.open, start_new_session=True, **quiet)
    with contextlib.suppress(subprocess.TimeoutExpired):
        bash.wait(1.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(bash.pid, signal.SIGKILL)
    bash.wait()
    return ""
