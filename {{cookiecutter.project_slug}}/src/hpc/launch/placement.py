"""Where this process stands among the ranks, read from what its launcher left in the environment. No torch."""

import math
import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from hpc.config.errors import ConfigError
from hpc.system.process import die_with_parent

# launcher -> the variables that hold rank, world size, rank on the node, ranks on the node. In this order: a later one
# may have started an earlier one (srun a torchrun, say).
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpiexec (Open MPI)": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpiexec (PALS)": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    "mpiexec (MPICH)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
LOOPBACK = {"127.0.0.1", "127.0.1.1", "::1"}


@dataclass(frozen=True)
class Placement:
    """One process among the ranks. `launcher` is "none" for a process that a person or Lightning started."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int  # processes per node; 0 where nodes differ
    master: str = ""  # name of rank 0's host, where the launcher tells
    step: str = ""  # the scheduler's name for this launch, the same on every rank

    @property
    def node_rank(self) -> int:
        """Index of this process's node, as ranks are packed node by node."""
        return self.rank // (self.local_world_size or 1)


def read_placement(environ: Mapping[str, str]) -> Placement:
    """Read the launcher's variables. torchrun and mpiexec are asked before srun, which may have started them."""
    for launcher, names in LAUNCHERS.items():
        told = all(_is_number(environ.get(name, "")) for name in names)
        if told and (launcher != "torchrun" or "TORCHELASTIC_RUN_ID" in environ):
            rank, size, local_rank, local_size = (int(environ[name]) for name in names)
            return Placement(launcher, rank, size, local_rank, local_size, environ.get("MASTER_ADDR", ""))
    if "SLURM_STEP_ID" in environ and _is_number(environ.get("SLURM_STEP_NUM_TASKS", "")):
        return _srun_placement(environ)
    # Lightning's own children and processes that were placed by hand: only a message wants to know the rank.
    ranks = [environ.get(name, "") for name in ("LOCAL_RANK", "NODE_RANK")]
    return Placement("none", sum(int(rank) for rank in ranks if _is_number(rank)), 1, 0, 1)


def is_reporting_rank(place: Placement, environ: Mapping[str, str]) -> bool:
    """Is this the rank that tells what all ranks know? Also where each believes to be the only one."""
    return place.rank == 0 and environ.get("SLURM_PROCID", "0") == "0"


def is_lightning_child(place: Placement) -> bool:
    """Has Lightning started this process, beside the one that a person started?"""
    return place.launcher == "none" and place.rank > 0


def is_in_job(environ: Mapping[str, str]) -> bool:
    """Is this process part of a job of Slurm or PBS?"""
    return "SLURM_JOB_ID" in environ or "PBS_JOBID" in environ


def num_usable_cores(ranks_on_node: int, environ: Mapping[str, str]) -> int:
    """CPUs that this process may keep busy: its own where srun gave each task some, else its share of the node's."""
    allowed = len(os.sched_getaffinity(0))
    own = environ.get("SLURM_CPUS_PER_TASK", "") if read_placement(environ).launcher == "srun" else ""
    return min(allowed, int(own)) if _is_number(own) else max(1, allowed // ranks_on_node)


def job_end_unix_time(environ: Mapping[str, str]) -> float | None:
    """Unix time when the scheduler ends the job, as its script tells; None: nobody does. Raises `ConfigError`."""
    told = environ.get("HPC_JOB_END") or "0"
    try:
        end = float(told)
    except ValueError:
        end = math.nan
    if not math.isfinite(end):
        raise ConfigError("HPC_JOB_END", ascii(told), "must be a unix time in seconds", "unset HPC_JOB_END")
    return end or None


def job_id(environ: Mapping[str, str]) -> str:
    """The scheduler's number of this job, the same after a requeue; "" outside of jobs."""
    if "SLURM_ARRAY_JOB_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID") or environ.get("PBS_JOBID", "").split(".")[0]


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: `n[07-09,12],login` -> `n07`; suffixes and several brackets included."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodes)[0])


def export_rank_variables(place: Placement, suffix: str, environ: MutableMapping[str, str]) -> None:
    """Give the ranks what torch.distributed's env:// asks for, whoever launched them; the port comes with the store.

    Raises:
        ConfigError: MASTER_ADDR is set and leads to another host than rank 0's.
    """
    if place.launcher != "torchrun":
        environ["MASTER_ADDR"] = _rank_0_address(place, suffix, environ.get("MASTER_ADDR"))
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
    """A process of a step. The step's own variables, as the job's may have been inherited or describe more nodes.

    Raises:
        ConfigError: srun sets them all, and one is missing or no number.
    """
    for name in ("SLURM_PROCID", "SLURM_LOCALID"):
        if not _is_number(environ.get(name, "")):
            rule = "must be a number in a step of srun, which sets it for each task"
            raise ConfigError(name, environ.get(name), rule, "unset SLURM_STEP_ID, or srun python train.py ...")
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    return Placement(
        "srun",
        int(environ["SLURM_PROCID"]),
        int(environ["SLURM_STEP_NUM_TASKS"]),
        int(environ["SLURM_LOCALID"]),
        0 if "," in per_node else int(re.match(r"\d*", per_node)[0] or 0),  # type: ignore[index]
        first_host(environ.get("SLURM_STEP_NODELIST", "")),
        environ["SLURM_STEP_ID"],
    )


def _rank_0_address(place: Placement, suffix: str, asked: str | None) -> str:
    """Rank 0's address: the first node's name, or what was exported if that is the same machine."""
    if place.local_world_size == place.world_size:
        return "127.0.0.1"  # all ranks are on this machine, whatever a shell has left behind
    expected = place.master + suffix if place.launcher == "srun" else asked
    if not expected:
        rule = f"{place.launcher} does not tell the ranks where rank 0 runs"
        raise ConfigError("MASTER_ADDR", None, rule, "export MASTER_ADDR=$(hostname) before it, on the first node")
    if not asked or asked in (place.master, expected):
        return expected
    here = _ip_addresses(place.master) | _ip_addresses(expected)
    if not _ip_addresses(asked) & here - LOOPBACK:
        rule = f"rank 0 runs on {place.master}; ranks that follow this address would wait elsewhere"
        raise ConfigError("MASTER_ADDR", asked, rule, "unset MASTER_ADDR before srun")
    return asked


def _ip_addresses(host: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return set()
