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

from hpc.config import preflight
from hpc.config.errors import ConfigError, RunFinished
from hpc.config.project import PROJECT
from hpc.launch import placement
from hpc.launch.placement import Placement
from hpc.system import files

PACKAGES = ("torch", "lightning", "deepspeed", "hydra-core")


def check_launch(cfg: DictConfig, place: Placement, environ: Mapping[str, str]) -> None:
    """The launch is the one that the config asks for. From the environment alone, so every rank decides alike.

    Raises:
        ConfigError: too many or too few processes, none where a job was meant, or a kind of job that cannot work.
    """
    nodes, devices = cfg.trainer.num_nodes, cfg.trainer.devices
    launched = f"srun --nodes={nodes} --ntasks-per-node={devices} python train.py ..."
    if "PBS_JOBID" in environ:
        launched = f"python submit.py ..., or on each node torchrun --nnodes={nodes} --nproc-per-node={devices} ..."
    if environ.get("SLURM_HET_SIZE", "1") not in ("", "1"):
        rule = "ranks cannot be numbered across the parts of a heterogeneous job"
        raise ConfigError("SLURM_HET_SIZE", environ["SLURM_HET_SIZE"], rule, "one part, all nodes alike")
    if place.launcher == "none":
        _check_unlaunched(cfg, environ, launched)
        return
    if (place.world_size, place.local_world_size) != (nodes * devices, devices):
        asked = f"trainer.num_nodes={nodes} trainer.devices={devices}"
        started = f"{place.world_size} in all, {place.local_world_size or 'not equally many'} on a node"
        rule = f"is {nodes * devices} ranks, {devices} on a node; {place.launcher} started {started}"
        raise ConfigError(asked, None, rule, launched)
    if "SLURM_NODEID" in environ and place.launcher == "torchrun" and environ["SLURM_NODEID"] != str(place.node_rank):
        rule = f"torchrun was told node rank {place.node_rank} on node {environ['SLURM_NODEID']} of the step"
        fix = "srun bash -c 'torchrun --node-rank=$SLURM_NODEID ...' with single quotes, or srun python"
        raise ConfigError("--node-rank", place.node_rank, rule, fix, only_this_rank=place.local_rank == 0)


def collect_node_facts(
    cfg: DictConfig, place: Placement, environ: Mapping[str, str], look: bool = True
) -> dict[str, Any]:
    """What this process knows of its node. `rejected`: the first thing here that does not fit the config."""
    known: dict[str, Any] = {"host": socket.gethostname(), "rejected": None}
    try:
        _check_resources(cfg, place, environ)
        if look:
            preflight.check_files(cfg)
    except ConfigError as rejected:
        known["rejected"] = rejected.parts()
    if place.launcher == "none":
        return known  # there is nobody to differ from
    known["config"] = f"{zlib.crc32(repr(OmegaConf.to_container(cfg, resolve=True)).encode()):08x}"
    if place.local_rank == 0:
        known["code"] = files.source_checksum(PROJECT)
        known["versions"] = f"Python {sys.version.split()[0]}, " + ", ".join(map(_package_version, PACKAGES))
    return known


def check_agreement(known: list[dict[str, Any]]) -> None:
    """All nodes can, and are alike.

    Raises:
        ConfigError: the first complaint of a node, or what differs between them.
    """
    for fact in known:
        if fact.get("rejected"):
            key, value, rule, fix = fact["rejected"]
            if fact.get("finished"):
                raise RunFinished(key, value, rule, fix)
            raise ConfigError(key, value, f"on {fact['host']}: {rule}" if len(known) > 1 else rule, fix)
    fixes = {
        "config": "no ${oc.env:...} or clock in what ranks must share; python submit.py freezes the config",
        "code": "python submit.py ..., which runs all ranks from one snapshot",
        "versions": "one environment that all nodes see: export VENV=<shared directory>; source env.sh",
    }
    for what, fix in fixes.items():
        hosts = defaultdict(set)
        for fact in known:
            if what in fact:
                hosts[fact[what]].add(fact["host"])
        if len(hosts) > 1:
            rule = "differs between ranks: " + "; ".join(f"{', '.join(sorted(on))}: {is_}" for is_, on in hosts.items())
            raise ConfigError(what, None, rule, fix)


def _check_unlaunched(cfg: DictConfig, environ: Mapping[str, str], launched: str) -> None:
    """Nobody launched this process as a rank: right for one node, wrong for several, and not on a login node."""
    if "NODE_RANK" in environ or "LOCAL_RANK" in environ:
        return  # Lightning did, or somebody who says where each process stands
    nodes = cfg.trainer.num_nodes
    if nodes > 1:
        rule = "this process is alone: nothing started the ranks on the other nodes, and it would wait for them"
        fix = launched if placement.is_in_job(environ) else "python submit.py ..., or trainer.num_nodes=1"
        raise ConfigError("trainer.num_nodes", nodes, rule, fix)
    cluster = cfg.cluster
    if not cluster.scheduler or cfg.trainer.accelerator != cluster.accelerator:
        return
    if not placement.is_in_job(environ):
        rule = f"cluster={cluster.name} trains in jobs, and this is none (a login node?)"
        raise ConfigError("cluster", cluster.name, rule, "python submit.py ..., or cluster=local to train here")
    if "SLURM_JOB_ID" in environ and "SLURMD_NODENAME" not in environ:  # slurmd sets it, salloc's shell has none
        rule = f"job {environ['SLURM_JOB_ID']} has its nodes, and this process is on none of them"
        raise ConfigError("cluster", cluster.name, rule, launched)


def _check_resources(cfg: DictConfig, place: Placement, environ: Mapping[str, str]) -> None:
    """GPUs, cores and arithmetic that the config counts on are here."""
    trainer, cluster = cfg.trainer, cfg.cluster
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if trainer.accelerator == cluster.accelerator and cluster.request and visible is not None:
        _check_num_gpus(trainer.devices, len([name for name in visible.split(",") if name.strip()]), environ)
    cores = len(os.sched_getaffinity(0))
    wanted = min(cluster.cores_per_gpu or 1, os.cpu_count() or 1)
    if place.launcher == "srun" and cores < wanted:
        rule = f"this task may use {cores} of them; srun does not take --cpus-per-task over from sbatch everywhere"
        raise ConfigError("cluster.cores_per_gpu", cluster.cores_per_gpu, rule, f"srun --cpus-per-task={wanted} ...")
    if trainer.accelerator == "cpu" or place.local_rank:
        return
    import torch

    _check_num_gpus(trainer.devices, torch.cuda.device_count(), environ)
    if "bf16" in trainer.precision and not torch.cuda.is_bf16_supported(including_emulation=False):
        rule = f"{torch.cuda.get_device_name()} has no bfloat16 arithmetic"
        raise ConfigError("trainer.precision", trainer.precision, rule, "trainer.precision=16-mixed")


def _check_num_gpus(devices: int, found: int, environ: Mapping[str, str]) -> None:
    if found < devices:
        rule = f"{found} CUDA devices are visible to this task"
        fix = f"ngpus={devices} in the select of the job (cluster.request), or trainer.devices={found}"
        if "PBS_JOBID" not in environ:
            rule += " (each task sees all of its node's: no --gpus-per-task)"
            fix = f"--gpus-per-node={devices} (or --gres=gpu:{devices}), or trainer.devices={found}"
        raise ConfigError("trainer.devices", devices, rule, fix if found else "trainer=cpu, or ask for GPUs: " + fix)


def _package_version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"
