"""Read from the environment where this process stands among the ranks of its launch. Imports no torch."""

import hashlib
import math
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from hpc.config.errors import ConfigError
from hpc.system.process import die_with_parent, num_cores

# launcher → the variables that hold rank, world size, rank on the node, ranks on the node. They are looked up in this
# order, as a later launcher may have started an earlier one, for example mpiexec a torchrun.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "pbs_tmrsh": ("HPC_RANK", "HPC_WORLD_SIZE", "HPC_LOCAL_RANK", "HPC_LOCAL_WORLD_SIZE"),  # set by pbs.bash
    "mpiexec (Open MPI)": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpiexec (PALS)": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    "mpiexec (MPICH)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
LOOPBACK = {"127.0.0.1", "127.0.1.1", "::1"}


@dataclass(frozen=True)
class Placement:
    """Place of one process among the ranks."""

    launcher: str  # "none" for a process that a person or Lightning started
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int  # processes per node; 0 where nodes differ
    master: str = ""  # name of rank 0's host, if the launcher sets it
    step: str = ""  # the scheduler's name for this launch, the same on every rank

    @property
    def node_rank(self) -> int:
        """Index of this process's node. Ranks are numbered node by node."""
        return self.rank // (self.local_world_size or 1)


def read_placement(environ: Mapping[str, str]) -> Placement:
    """Return the placement of this process from its launcher's variables.

    Those of torchrun and mpiexec come before those of srun, which may have started them.
    """
    for launcher, names in LAUNCHERS.items():
        is_complete = all(_is_number(environ.get(name, "")) for name in names)
        if is_complete and (launcher != "torchrun" or "TORCHELASTIC_RUN_ID" in environ):
            rank, size, local_rank, local_size = (int(environ[name]) for name in names)
            return Placement(launcher, rank, size, local_rank, local_size, environ.get("MASTER_ADDR", ""))
    if "SLURM_STEP_ID" in environ and _is_number(environ.get("SLURM_STEP_NUM_TASKS", "")):
        return _srun_placement(environ)
    # A child of Lightning, or a process that a person placed by hand. The rank decides only who prints messages.
    ranks = [environ.get(name, "") for name in ("LOCAL_RANK", "NODE_RANK")]
    return Placement("none", sum(int(rank) for rank in ranks if _is_number(rank)), 1, 0, 1)


def is_reporting_rank(place: Placement, environ: Mapping[str, str]) -> bool:
    """Return whether this rank prints what all ranks know, also where each rank takes itself for the only one."""
    return place.rank == 0 and environ.get("SLURM_PROCID", "0") == "0"


def is_lightning_child(place: Placement) -> bool:
    """Return whether Lightning started this process, beside the one that a person started."""
    return place.launcher == "none" and place.rank > 0


def is_in_job(environ: Mapping[str, str]) -> bool:
    """Return whether this process is part of a job of Slurm or PBS."""
    return "SLURM_JOB_ID" in environ or "PBS_JOBID" in environ


def num_usable_cores(num_local_ranks: int, environ: Mapping[str, str]) -> int:
    """Return how many CPUs this process may keep busy: those of its task under srun, else its share of the node's."""
    num_allowed = num_cores()
    cpus_per_task = environ.get("SLURM_CPUS_PER_TASK", "") if read_placement(environ).launcher == "srun" else ""
    return min(num_allowed, int(cpus_per_task)) if _is_number(cpus_per_task) else max(1, num_allowed // num_local_ranks)


def job_end_unix_time(environ: Mapping[str, str]) -> float | None:
    """Return the Unix time at which the scheduler ends the job, as its script has set it; None if it has not.

    Raises:
        ConfigError: the variable is no number.
    """
    text = environ.get("HPC_JOB_END") or "0"
    try:
        end = float(text)
    except ValueError:
        end = math.nan
    if not math.isfinite(end):
        raise ConfigError("HPC_JOB_END", ascii(text), "must be a unix time in seconds", "unset HPC_JOB_END")
    return end or None


def job_id(environ: Mapping[str, str]) -> str:
    """Return the scheduler's number of this job, the same after a requeue; "" outside of jobs."""
    if "SLURM_ARRAY_JOB_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID") or environ.get("PBS_JOBID", "").split(".")[0]


def start_key(environ: Mapping[str, str]) -> str:
    """Return what tells the starts of a job apart: Slurm's count of restarts, or a digest of PBS's cookie; else "0"."""
    if cookie := environ.get("PBS_JOBCOOKIE", ""):  # a secret: who knows it may start processes in the job
        return f"pbs-{hashlib.sha256(cookie.encode(errors='replace')).hexdigest()[:16]}"
    return environ.get("SLURM_RESTART_COUNT", "0")


def first_host(nodes: str) -> str:
    """Return the first name of a Slurm node list, for example n07 of `n[07-09,12],login`."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodes)[0])


def export_rank_variables(place: Placement, environ: MutableMapping[str, str], *, host_suffix: str) -> None:
    """Set the variables that torch.distributed's env:// reads, for any launcher. MASTER_PORT comes with the store.

    Args:
        host_suffix: what to append to the name of rank 0's host (`cluster.master_addr_suffix`).

    Raises:
        ConfigError: MASTER_ADDR is set and leads to another host than rank 0's.
    """
    if place.launcher != "torchrun":
        environ["MASTER_ADDR"] = _rank_0_address(place, host_suffix, exported=environ.get("MASTER_ADDR"))
    else:
        die_with_parent()  # torchrun starts workers in sessions of their own, where PBS does not find them
    environ.update(
        {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.local_world_size),
            "GROUP_RANK": str(place.node_rank),
            "NODE_RANK": str(place.node_rank),
        }
    )


def _is_number(text: str) -> bool:
    return re.fullmatch("[0-9]{1,9}", text) is not None


def _srun_placement(environ: Mapping[str, str]) -> Placement:
    """Return the placement of a task of srun.

    The variables of the step are read, as those of the job may have been inherited or describe more nodes.

    Raises:
        ConfigError: a variable that srun sets is missing or no number.
    """
    for name in ("SLURM_PROCID", "SLURM_LOCALID"):
        if not _is_number(environ.get(name, "")):
            rule = "must be a number in a step of srun, which sets it for each task"
            raise ConfigError(name, environ.get(name), rule, "unset SLURM_STEP_ID, or srun python train.py ...")
    tasks_per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    return Placement(
        "srun",
        int(environ["SLURM_PROCID"]),
        int(environ["SLURM_STEP_NUM_TASKS"]),
        int(environ["SLURM_LOCALID"]),
        0 if "," in tasks_per_node else int(re.match(r"\d*", tasks_per_node)[0] or 0),  # type: ignore[index]
        first_host(environ.get("SLURM_STEP_NODELIST", "")),
        environ["SLURM_STEP_ID"],
    )


def _rank_0_address(place: Placement, host_suffix: str, *, exported: str | None) -> str:
    """Return rank 0's address: the first node's name, or the exported MASTER_ADDR if that is the same machine."""
    if place.local_world_size == place.world_size:
        return "127.0.0.1"  # all ranks are on this machine, whatever a shell has left behind
    expected = place.master + host_suffix if place.launcher == "srun" else exported
    if not expected:
        rule = f"must be exported, as {place.launcher} does not tell the ranks where rank 0 runs"
        raise ConfigError("MASTER_ADDR", None, rule, "export MASTER_ADDR=$(hostname) before it, on the first node")
    if not exported or exported in (place.master, expected):
        return expected
    rank_0_addresses = _ip_addresses(place.master) | _ip_addresses(expected)
    if not _ip_addresses(exported) & rank_0_addresses - LOOPBACK:
        rule = f"must be an address of {place.master}, where rank 0 runs"
        raise ConfigError("MASTER_ADDR", exported, rule, "unset MASTER_ADDR before srun")
    return exported


def _ip_addresses(host: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return set()
