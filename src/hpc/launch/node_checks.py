"""Check before the process group starts that the launch, the nodes and the config agree."""

import os
import socket
import sys
import zlib
from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hpc.config import arguments
from hpc.config.errors import ConfigError, RunFinished
from hpc.config.project import LIBRARY, PROJECT
from hpc.config.sections import Config
from hpc.launch import placement
from hpc.launch.placement import Placement
from hpc.system import files, process

PACKAGES = ("torch", "lightning", "deepspeed", "hydra-core")  # whose versions all nodes must share
# What to do if a fact of the nodes differs between them.
AGREEMENT_FIXES = {
    "config": "take ${oc.env:...} and clocks out of what ranks must share; python submit.py freezes the config",
    "code": "python submit.py ..., which runs all ranks from one snapshot",
    "versions": "one environment that all nodes see: export VENV=<shared directory>; source env.sh",
}


def count_auto_devices(cfg: DictConfig) -> None:
    """Set trainer.accelerator=auto and trainer.devices=auto to what this machine has. Modifies cfg."""
    trainer = cfg.trainer
    if "auto" not in (trainer.accelerator, trainer.devices):
        return
    import torch

    if trainer.accelerator == "auto":
        trainer.accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    if trainer.devices == "auto":
        trainer.devices = max(torch.cuda.device_count(), 1) if trainer.accelerator == "gpu" else 1


def check_launch(cfg: Config, place: Placement, *, environ: Mapping[str, str]) -> None:
    """Check that the launch is the one that the config asks for. The environment decides, so every rank decides alike.

    Raises:
        ConfigError: too many or too few processes, no job where one is needed, or a kind of job that cannot work.
    """
    num_nodes, num_devices = cfg.trainer.num_nodes, cfg.trainer.devices
    command = f"srun --nodes={num_nodes} --ntasks-per-node={num_devices} python train.py ..."
    if "PBS_JOBID" in environ:
        options = f"--nnodes={num_nodes} --nproc-per-node={num_devices}"
        command = f"python submit.py ..., or on each node torchrun {options} ..."
    if environ.get("SLURM_HET_SIZE", "1") not in ("", "1"):
        rule = "must be 1: ranks cannot be numbered across the parts of a heterogeneous job"
        raise ConfigError("SLURM_HET_SIZE", environ["SLURM_HET_SIZE"], rule, "one part, all nodes alike")
    if place.launcher == "none":
        _check_unlaunched(cfg, environ, command=command)
        return
    if (place.world_size, place.local_world_size) != (num_nodes * num_devices, num_devices):
        keys = f"trainer.num_nodes={num_nodes} trainer.devices={num_devices}"
        started = f"{place.world_size} in all, {place.local_world_size or 'not equally many'} on a node"
        needed = f"{num_nodes * num_devices} ranks, {num_devices} on a node"
        raise ConfigError(keys, None, f"must be launched as {needed}; {place.launcher} started {started}", command)
    if "SLURM_NODEID" in environ and place.launcher == "torchrun" and environ["SLURM_NODEID"] != str(place.node_rank):
        rule = f"must be the node's number in the step ({environ['SLURM_NODEID']})"
        fix = "srun bash -c 'torchrun --node-rank=$SLURM_NODEID ...' with single quotes, or srun python"
        raise ConfigError("--node-rank", place.node_rank, rule, fix, only_this_rank=place.local_rank == 0)


def collect_node_facts(
    cfg: Config, place: Placement, *, environ: Mapping[str, str], check_files: bool = True
) -> dict[str, Any]:
    """Return the facts of this process and its node that all ranks compare.

    Args:
        check_files: whether to check the files that the config names, as seen from this node.

    Returns:
        host; rejected: the parts of the first `ConfigError` here, or None; of launched ranks a checksum of the config,
        and of one rank per node a checksum of the code and the versions of packages.
    """
    facts: dict[str, Any] = {"host": socket.gethostname(), "rejected": None}
    try:
        if place.local_rank == 0:
            from hpc.config import versions  # only here: no other answer needs it

            versions.reject_unsupported_packages()
        _check_resources(cfg, place, environ=environ)
        if check_files:
            arguments.check_files(cfg)
    except ConfigError as error:
        facts["rejected"] = error.parts()
    if place.launcher == "none":
        return facts  # there are no other ranks to compare with
    facts["config"] = f"{zlib.crc32(repr(OmegaConf.to_container(cfg.node, resolve=True)).encode()):08x}"
    if place.local_rank == 0:
        facts["code"] = files.source_checksum(PROJECT, LIBRARY)
        facts["versions"] = f"Python {sys.version.split()[0]}, " + ", ".join(map(_package_version, PACKAGES))
    return facts


def check_agreement(all_facts: list[dict[str, Any]]) -> None:
    """Check that no node rejects the config, and that all nodes are alike.

    Args:
        all_facts: the facts of every rank, see `collect_node_facts`.

    Raises:
        ConfigError: the first error of a node, or what differs between nodes.
    """
    for facts in all_facts:
        if facts.get("rejected"):
            key, value, rule, fix = facts["rejected"]
            if facts.get("finished"):
                raise RunFinished(key, value, rule, fix)
            raise ConfigError(key, value, f"{rule} (on {facts['host']})" if len(all_facts) > 1 else rule, fix)
    for name, fix in AGREEMENT_FIXES.items():
        hosts_by_value = defaultdict(set)
        for facts in all_facts:
            if name in facts:
                hosts_by_value[facts[name]].add(facts["host"])
        if len(hosts_by_value) > 1:
            values = "; ".join(f"{value} on {', '.join(sorted(hosts))}" for value, hosts in hosts_by_value.items())
            raise ConfigError(name, None, f"must be the same on all ranks, but it differs: {values}", fix)


def _check_unlaunched(cfg: Config, environ: Mapping[str, str], *, command: str) -> None:
    """Check a process that no launcher started: it can train on one node, but not on several or on a login node.

    Args:
        command: how to launch the ranks of this config.
    """
    if "NODE_RANK" in environ or "LOCAL_RANK" in environ:
        return  # Lightning started it, or a person who places each process by hand
    num_nodes = cfg.trainer.num_nodes
    if num_nodes > 1:
        rule = "must be 1 for a process that is alone: nothing started the ranks on the other nodes"
        fix = command if placement.is_in_job(environ) else "python submit.py ..., or trainer.num_nodes=1"
        raise ConfigError("trainer.num_nodes", num_nodes, rule, fix)
    cluster = cfg.cluster
    if not cluster.scheduler or cfg.trainer.accelerator != cluster.accelerator:
        return
    if not placement.is_in_job(environ):
        rule = "Training on this cluster must run in a job, and this process is in none (a login node?)"
        raise ConfigError("cluster", cluster.name, rule, "python submit.py ..., or cluster=local to train here")
    if "SLURM_JOB_ID" in environ and "SLURMD_NODENAME" not in environ:  # slurmd sets it; the shell of salloc has none
        rule = f"Training must run on the nodes of job {environ['SLURM_JOB_ID']}, and this process is on none of them"
        raise ConfigError("cluster", cluster.name, rule, command)


def _check_resources(cfg: Config, place: Placement, *, environ: Mapping[str, str]) -> None:
    """Check that this process has the GPUs and cores that the config counts on, and that the GPU has its precision."""
    trainer, cluster = cfg.trainer, cfg.cluster
    visible_devices = environ.get("CUDA_VISIBLE_DEVICES")
    if trainer.accelerator == cluster.accelerator and cluster.request and visible_devices is not None:
        num_visible = len([name for name in visible_devices.split(",") if name.strip()])
        _check_num_gpus(trainer.devices, num_visible, environ=environ)
    num_cores = process.num_cores()
    num_needed = min(cluster.cores_per_gpu or 1, os.cpu_count() or 1)
    if place.launcher == "srun" and num_cores < num_needed:
        rule = f"must be at most {num_cores}, the cores of this task (srun may not inherit --cpus-per-task of sbatch)"
        fix = f"srun --cpus-per-task={num_needed} ..."
        raise ConfigError("cluster.cores_per_gpu", cluster.cores_per_gpu, rule, fix)
    if trainer.accelerator == "cpu" or place.local_rank:
        return
    import torch

    _check_num_gpus(trainer.devices, torch.cuda.device_count(), environ=environ)
    if "bf16" in trainer.precision and not torch.cuda.is_bf16_supported(including_emulation=False):
        rule = f"must not be bf16 on {torch.cuda.get_device_name()}, which has no bfloat16 arithmetic"
        raise ConfigError("trainer.precision", trainer.precision, rule, "trainer.precision=16-mixed")


def _check_num_gpus(num_devices: int, num_visible: int, *, environ: Mapping[str, str]) -> None:
    if num_visible > num_devices and "HPC_RUNS_PER_NODE" in environ:  # set by the job script
        rule = f"must be false where a run that shares its node sees {num_visible} GPUs, not only its own {num_devices}"
        raise ConfigError("cluster.whole_nodes", True, rule, "the sweep again, with cluster.whole_nodes=false")
    if num_visible < num_devices:
        if not num_visible and not environ.keys() & {"PBS_JOBID", "SLURM_JOB_ID"}:
            raise ConfigError("trainer.devices", num_devices, "This machine has no CUDA device", "trainer=cpu")
        rule = f"must be at most {num_visible}, the CUDA devices that this task sees"
        fix = f"ngpus={num_devices} in the select of the job (cluster.request)"
        if "PBS_JOBID" not in environ:
            rule += " (each task sees all of its node's: no --gpus-per-task)"
            fix = f"--gpus-per-node={num_devices} (or --gres=gpu:{num_devices})"
        fix = f"{fix}, or trainer.devices={num_visible}" if num_visible else f"trainer=cpu, or ask for GPUs: {fix}"
        raise ConfigError("trainer.devices", num_devices, rule, fix)


def _package_version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"
