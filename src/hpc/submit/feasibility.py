"""Ask the scheduler, before anything is written, whether a job can ever start.

`sbatch --test-only` gets the very script. Slurm also takes jobs that it will never start, such as one that exceeds a
limit of its QoS: a comparison with these limits finds them. PBS has no such test, so there all is compared.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime

from hpc.config.errors import ConfigError, closest_word, raise_problems
from hpc.config.sections import ClusterConfig, Config
from hpc.jobs import pbs_inventory, slurm_inventory
from hpc.jobs.inventory import Inventory
from hpc.jobs.job import Job
from hpc.submit import limits, node_limits, scheduler

TEST_SECONDS = 30  # for `sbatch --test-only` to answer
START = re.compile(r"Job \S+ to start at (\S+)(?:.* in partition (\S+))?")
NO_CONTACT = re.compile("unable to contact|timed out|connect failure|standby mode", re.IGNORECASE)
# Slurm's messages about what will not change while a job waits (slurm_errno.c), and the keys that they are about.
# All others may pass, such as a node that is down; what they mean is left to sbatch itself.
FINAL_MESSAGES = {
    "Requested node configuration is not available": node_limits.KEYS_OF_NODES,
    "More processors requested than permitted": node_limits.KEYS_OF_NODES,
    "Memory required by task is not available": "cluster.memory_gb",
    "Node count specification invalid": "trainer.num_nodes",
    "Requested time limit is invalid": "cluster.time",
    "invalid partition|No partition specified": "cluster.partition",
    "User's group not permitted to use this partition": "cluster.partition",
    "Invalid account": "cluster.account",
    "Invalid qos": "cluster.qos",
    "Invalid feature": "cluster.constraint",
    "Invalid generic resource": "cluster.request",
    "Invalid license|reservation is invalid|unrecognized option|invalid option": "cluster.options",
}


def reject_impossible_job(job: Job, cfg: Config, script: str) -> datetime | None:
    """Raise `ConfigError` if the job could never start, or the scheduler does not answer.

    Args:
        script: the text for sbatch or qsub.

    Returns:
        When Slurm expects to start it; None if that is not known.
    """
    if cfg.cluster.scheduler == "pbs":
        inventory = pbs_inventory.query()
        raise_problems(problems_on_pbs(job, cfg.cluster, inventory))
        note_unanswered(inventory)
        return None
    with ThreadPoolExecutor(1) as pool:
        inventory_answer = pool.submit(slurm_inventory.query, uid=os.getuid())
        message = test_script(script)
        inventory = inventory_answer.result()
    raise_problems(problems(job, cfg, message, inventory))
    note_unanswered(inventory)
    start = START.search(message)
    return datetime.fromisoformat(start[1]) if start else None


def note_unanswered(inventory: Inventory) -> None:
    """Print which commands did not tell their limits. Many sites have no database of accounts for sacctmgr."""
    if commands := [command for command in inventory.unanswered if command != "sacctmgr"]:
        told = f"{' and '.join(commands)} told nothing that can be read"
        print(f"note: {told}, so not all limits of the cluster were compared with the job", file=sys.stderr)


def test_script(script: str) -> str:
    """Return what `sbatch --test-only` says to a script. Raise `ConfigError` if it does not reach Slurm."""
    command = [scheduler.find_submit_command("slurm"), "--test-only"]
    options = {"input": script, "capture_output": True, "text": True, "errors": "replace", "timeout": TEST_SECONDS}
    try:
        done = subprocess.run(command, env=scheduler.submit_environ(), **options)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        message = f"sbatch has not answered within {TEST_SECONDS} seconds"
    except OSError as error:
        message = f"sbatch cannot be run: {error}"
    else:
        message = " ".join((done.stdout + done.stderr).split())
        if not done.returncode or not NO_CONTACT.search(message):
            return message
    raise ConfigError("The scheduler", None, f"{message}. Nothing is queued", "the same again, in some minutes")


def problems(job: Job, cfg: Config, message: str, inventory: Inventory) -> Iterator[ConfigError]:
    """Yield why Slurm could never start the job. Pure.

    Args:
        message: of `sbatch --test-only`.
        inventory: what Slurm tells of its limits. Facts of nodes only explain a rejection, as Slurm knows them better.
    """
    if start := START.search(message):
        if not job.partition and start[2]:  # at some sites a plugin has chosen it, and not the default one
            job = replace(job, partition=start[2])
        return iter(limits.problems(job, inventory))
    key = next((key for words, key in FINAL_MESSAGES.items() if re.search(words, message)), None)
    found: list[ConfigError] = []
    if job.partition or not inventory.rewrites_jobs:
        found += limits.problems(job, inventory)
        found += node_limits.problems(job, cfg.cluster, inventory) if key else []
    if key:
        found += _unknown_names(job, key, inventory)
        if not found:
            text = re.sub(r"\b(allocation failure|sbatch: error): ", "", message)
            rule = f"Slurm can never start this job, and says: {text}. Nothing is queued"
            found = [ConfigError("sbatch", None, rule, f"another value of {key}")]
    return iter(found)


def problems_on_pbs(job: Job, cluster: ClusterConfig, inventory: Inventory) -> Iterator[ConfigError]:
    """Yield why PBS could never start the job. qsub takes what no node has, and the job waits for ever. Pure."""
    if job.partition:
        yield from _unknown_names(job, "cluster.partition", inventory)
    yield from limits.problems(job, inventory)
    yield from node_limits.problems(job, cluster, inventory)


def _unknown_names(job: Job, key: str, inventory: Inventory) -> Iterator[ConfigError]:
    """Yield that a partition, account or QoS is none of those that this user has."""
    accounts = [item for item in inventory.associations if not job.account or item.account == job.account]
    names: dict[str, Sequence[str]] = {
        "cluster.partition": list(dict.fromkeys(partition.name for partition in inventory.partitions)),
        "cluster.account": sorted({item.account for item in inventory.associations}),
        "cluster.qos": sorted({name for item in accounts for name in item.qos_names}),
    }
    given = {"cluster.partition": job.partition, "cluster.account": job.account, "cluster.qos": job.qos}
    if names.get(key) and not set((given[key] or "").split(",")) <= set(names[key]):
        rule = f"must be one that you may use on this cluster: {', '.join(names[key])}"
        fix = f"{key}={closest_word(given[key] or '', names[key], names[key][0])}"
        yield ConfigError(key, given[key] or "null", rule, fix)
