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
# Slurm says this also if suitable nodes are down (its job_start_data), so that it is final only with a reason.
NO_SUCH_NODES = "Requested node configuration is not available"
# Other messages about what will not change while a job waits (slurm_errno.c), and the keys that they are about. All
# others may pass, such as a node that is down; what they mean is left to sbatch itself.
FINAL_MESSAGES = {
    "CPU count per node can not be satisfied": "trainer.devices, cluster.cores_per_gpu",
    "Memory specification can not be satisfied": "cluster.memory_gb",
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
    """Raise `ConfigError` if the job could never start, or the scheduler cannot be reached.

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
    is_other_cluster = any(re.match(r"--clusters\b|-M", option) for option in job.options)
    with ThreadPoolExecutor(1) as pool:
        answer = None if is_other_cluster else pool.submit(slurm_inventory.query, uid=os.getuid())
        message = test_script(script)
        inventory = answer.result() if answer else Inventory()
    raise_problems(problems(job, cfg, message, inventory))
    note_unanswered(inventory)
    return parse_start(message)


def parse_start(message: str) -> datetime | None:
    """Return the expected start in an answer of `sbatch --test-only`; None if there is none that can be read."""
    start = START.search(message)
    try:
        return datetime.fromisoformat(start[1]) if start else None
    except ValueError:
        return None


def note_unanswered(inventory: Inventory) -> None:
    """Print which commands gave no answer. Many sites have no database of accounts for sacctmgr."""
    if commands := [command for command in inventory.unanswered if command != "sacctmgr"]:
        names = " and ".join(commands)
        print(f"note: {names} gave no usable answer, so some limits of the cluster were not checked", file=sys.stderr)


def test_script(script: str) -> str:
    """Return what `sbatch --test-only` says to a script; "" if it takes too long.

    Raises:
        ConfigError: sbatch does not reach Slurm.
    """
    command = [scheduler.find_submit_command("slurm"), "--test-only"]
    options = {"input": script, "capture_output": True, "text": True, "errors": "replace", "timeout": TEST_SECONDS}
    try:
        done = subprocess.run(command, env=scheduler.submit_environ(), **options)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:  # a test looks at the whole queue, and may take longer than a submission
        print(f"note: sbatch --test-only has not answered within {TEST_SECONDS} seconds", file=sys.stderr)
        return ""
    except OSError as error:
        raise ConfigError("sbatch", None, f"cannot be run: {error}", "ssh to a login node") from None
    message = " ".join((done.stdout + done.stderr).split())
    if done.returncode and NO_CONTACT.search(message):
        raise ConfigError("The scheduler", None, f"{message}. Nothing is queued", "the same again, in some minutes")
    return message


def problems(job: Job, cfg: Config, message: str, inventory: Inventory) -> list[ConfigError]:
    """Return why Slurm could never start the job. Pure.

    Args:
        message: of `sbatch --test-only`.
        inventory: what Slurm reports. Facts of nodes only explain a rejection, as Slurm knows them better.
    """
    if start := START.search(message):
        if not job.partition and start[2]:  # at some sites a plugin has chosen it, and not the default one
            job = replace(job, partition=start[2])
        return limits.problems(job, inventory, is_accepted=True)
    key = next((key for words, key in FINAL_MESSAGES.items() if re.search(words, message)), None)
    errors: list[ConfigError] = []
    if job.partition or not inventory.rules.rewrites_jobs:
        errors += limits.problems(job, inventory, is_accepted=key is None)
        errors += node_limits.problems(job, cfg.cluster, inventory) if key or NO_SUCH_NODES in message else []
    if key:
        errors += _unknown_names(job, key, inventory)
    if key and not errors:
        text = re.sub(r"\b(allocation failure|sbatch: error): ", "", message)
        rule = f"Slurm can never start this job, and says: {text}. Nothing is queued"
        errors = [ConfigError("sbatch", None, rule, f"another value of {key}")]
    return errors


def problems_on_pbs(job: Job, cluster: ClusterConfig, inventory: Inventory) -> list[ConfigError]:
    """Return why PBS could never start the job. qsub takes what no node has, and the job waits for ever. Pure."""
    if "@" in (job.partition or ""):  # a queue of another server, of which nothing is known here
        return []
    errors = list(_unknown_names(job, "cluster.partition", inventory)) if job.partition else []
    errors += limits.problems(job, inventory, is_accepted=True)
    return errors + node_limits.problems(job, cluster, inventory)


def _unknown_names(job: Job, key: str, inventory: Inventory) -> Iterator[ConfigError]:
    """Yield that a partition, account or QoS is none of those that there are. Slurm reads accounts in lower case."""
    account, qos = (job.account or "").lower(), (job.qos or "").lower()
    accounts = [item for item in inventory.associations if account in ("", item.account)]
    names: dict[str, Sequence[str]] = {
        "cluster.partition": list(dict.fromkeys(partition.name for partition in inventory.partitions)),
        "cluster.account": sorted({item.account for item in inventory.associations}),
        "cluster.qos": sorted({name for item in accounts for name in item.qos_names}),
    }
    given = {"cluster.partition": job.partition or "", "cluster.account": account, "cluster.qos": qos}
    if names.get(key) and not set(given[key].split(",")) <= set(names[key]):
        word = f"a {inventory.partition_word} of" if key == "cluster.partition" else "one that you may use on"
        fix = f"{key}={closest_word(given[key], names[key], names[key][0])}"
        yield ConfigError(key, given[key] or "null", f"must be {word} this cluster: {', '.join(names[key])}", fix)
