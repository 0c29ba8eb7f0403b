"""Reject a job that Slurm would take, and let wait for ever."""

import subprocess
from pathlib import Path

from hpc.config.errors import ConfigError
from hpc.submit import scheduler

IMPOSSIBLE = "Requested node configuration is not available"  # Slurm's words for it
ANSWER_SECONDS = 30
KEYS = "trainer.devices, cluster.cores_per_gpu, cluster.memory_gb, cluster.constraint"


def reject_impossible_job(script: Path) -> None:
    """Raise `ConfigError` if no node can ever have what the script asks for, according to `sbatch --test-only`.

    What else that command says may pass, such as a node that is down, and is left to sbatch itself.
    """
    command = [scheduler.find_submit_command("slurm"), "--test-only", str(script)]
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": ANSWER_SECONDS}
    try:
        done = subprocess.run(command, env=scheduler.submit_environ(), **options)  # type: ignore[call-overload]
    except (OSError, subprocess.TimeoutExpired):
        return
    if done.returncode and IMPOSSIBLE in done.stderr:
        rule = f"{IMPOSSIBLE}, says Slurm: the job would wait for ever, and is not queued"
        fix = f"smaller values of {KEYS}; sinfo -o '%P %D %c %m %G %f' shows what the nodes have"
        raise ConfigError("sbatch", script, rule, fix)
