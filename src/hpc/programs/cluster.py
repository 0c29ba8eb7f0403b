"""Write the file of this cluster: python tools/cluster.py NAME [--job] [--partition P] [--gpu TYPE] [--compare]

Type it on a login node. It asks the scheduler, and writes configs/cluster/NAME.yaml, with the source beside each key,
and configs/cluster/NAME.sh, with the modules that are loaded now. --compare writes nothing, and shows what differs from
the file that is there.
"""

import argparse
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hpc.config import errors, project
from hpc.config.errors import ConfigError
from hpc.config.yaml_files import YAML_ERRORS, load_yaml
from hpc.jobs import pbs_inventory, slurm_inventory
from hpc.jobs.inventory import Inventory
from hpc.studies import cluster_choices, cluster_facts, cluster_file, node_probe
from hpc.studies.cluster_choices import Choice
from hpc.studies.cluster_facts import Fact
from hpc.system.files import write_atomically


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line. Raise `ConfigError` if NAME cannot be the name of a file."""
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="of the file, as in cluster=NAME")
    parser.add_argument("--job", action="store_true", help="look at a node in a job of at most five minutes")
    parser.add_argument("--account", metavar="A", help="of this job")
    parser.add_argument("--partition", "--queue", metavar="P", help="with the nodes that the file is for")
    parser.add_argument("--gpu", metavar="TYPE", help="type of GPU, where a partition has several")
    parser.add_argument("--compare", action="store_true", help="show what differs from the file that is there")
    arguments = parser.parse_args(argv)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", arguments.name):
        rule = "must be a name of lower-case letters, digits and underscores"
        raise ConfigError("NAME", repr(arguments.name), rule, "python tools/cluster.py my_cluster")
    return arguments


def main() -> int:
    """Return 0, or 1 if --compare has found differences."""
    arguments = parse_arguments(sys.argv[1:])
    path = project.CONFIGS / "cluster" / f"{arguments.name}.yaml"
    existing = _read_existing(path, is_wanted=arguments.compare)
    scheduler, inventory = ask_scheduler()
    choices = cluster_choices.list_choices(inventory)
    word, partition = inventory.partition_word, arguments.partition or existing.get("partition")
    if arguments.compare and partition not in (None, *(choice.partition.name for choice in choices)):
        print(f"partition: the file has {partition}, which is no {word} with GPUs here; compared with another one:")
        partition = None
    choice = cluster_choices.choose(choices, partition=partition, gpu_type=arguments.gpu, word=word)
    if scheduler == "slurm":
        choice = slurm_choice(choice)
    probed = node_probe.probe(scheduler, options=_job_options(choice, scheduler, arguments)) if arguments.job else None
    facts = [Fact("scheduler", scheduler, "it is installed here"), Fact("login_host", login_host(), "this machine")]
    facts += cluster_facts.list_facts(choice, inventory, scheduler=scheduler, probed=probed)
    if arguments.compare:
        lines = cluster_file.compare(existing, facts)
        print("\n".join(lines) or f"{path} has no differences from what the scheduler reports")
        return 1 if lines else 0
    write_files(path, facts, choice=choice, choices=choices, word=word)
    if probed and node_probe.is_other_machine(probed):
        print(f"note: nodes are {probed.machine}, and this machine is not: type `source env.sh` in a job on a node")
    print_accounts(inventory)
    print(f"next: python submit.py trainer=ddp_4node cluster={arguments.name}")
    return 0


def _read_existing(path: Path, *, is_wanted: bool) -> dict[str, Any]:
    """Return the keys of the file, {} if a new one is wanted. Raise `ConfigError` if it is there, or is not."""
    if path.exists() != is_wanted:
        rule = "must exist to be compared" if is_wanted else "must not exist: it would be replaced"
        fix = "leave --compare out" if is_wanted else f"--compare, or remove {path.name}, or another NAME"
        raise ConfigError(str(path), None, rule, fix)
    if not is_wanted:
        return {}
    try:
        keys = OmegaConf.to_container(load_yaml(path))
    except YAML_ERRORS as error:
        raise ConfigError(str(path), None, f"cannot be read: {errors.first_line(error)}", "correct the YAML") from None
    return {str(key): value for key, value in keys.items()} if isinstance(keys, dict) else {}


def ask_scheduler() -> tuple[str, Inventory]:
    """Return slurm or pbs, and what it reports. Raise `ConfigError` if there is none, or none answers.

    Some sites have wrappers of the other one's commands: the scheduler is the one that answers.
    """
    queries = {
        "slurm": ("sbatch", lambda: slurm_inventory.query(uid=os.getuid())),
        "pbs": ("qsub", pbs_inventory.query),
    }
    unanswered: list[str] = []
    for name, (command, query) in queries.items():
        if not shutil.which(command):
            continue
        inventory = query()
        if inventory.partitions and inventory.nodes:
            return name, inventory
        unanswered += inventory.unanswered
    if unanswered:
        rule = f"{errors.join_names(unanswered)} gave no usable answer about partitions and nodes"
        raise ConfigError("The cluster", None, rule, "the same again, in some minutes, or a file by hand")
    rule = "must be on this machine's PATH, as they are on a login node of a cluster"
    raise ConfigError("sbatch or qsub", None, rule, "ssh to a login node, then this command again")


def login_host() -> str:
    """Return the full name of this machine, or the short one if there is no other."""
    name = socket.getfqdn()
    return socket.gethostname() if name.startswith("localhost") else name


def slurm_choice(choice: Choice) -> Choice:
    """Return a choice with the CPUs and the memory that jobs may use: a site may keep some of each for itself."""
    return cluster_choices.subtract_reserved(choice, slurm_inventory.query_node(choice.nodes.example))


def _job_options(choice: Choice, scheduler: str, arguments: argparse.Namespace) -> list[str]:
    """Return the options of a job that looks at a node of the choice."""
    if scheduler == "slurm":
        gpu = ":".join(filter(None, ["gpu", choice.gpu_type, "1"]))
        options = [f"--partition={choice.partition.name}", f"--gres={gpu}"]
        return [*options, f"--account={arguments.account}"] if arguments.account else options
    options = ["-q", choice.partition.name, "-l", "select=1:ncpus=1:ngpus=1"]
    return [*options, "-A", arguments.account] if arguments.account else options


def write_files(path: Path, facts: Sequence[Fact], *, choice: Choice, choices: Sequence[Choice], word: str) -> None:
    """Write NAME.yaml, and NAME.sh if modules are loaded."""
    title = [f"{choice.nodes.num_nodes} nodes of {word} {choice.partition.name}, by tools/cluster.py, {date.today()}"]
    title += cluster_file.describe_others(choice, choices, word)
    write_atomically(path, cluster_file.render(path.stem, facts, title=title))
    print(f"wrote {path}")
    modules = [module for module in os.environ.get("LOADEDMODULES", "").split(":") if module]
    if modules and not path.with_suffix(".sh").exists():
        write_atomically(path.with_suffix(".sh"), cluster_file.render_modules([shlex.quote(word) for word in modules]))
        print(f"wrote {path.with_suffix('.sh')}")
    for fact in facts:
        if fact.source.startswith("unknown"):
            print(f"{fact.key}: {fact.source}")


def print_accounts(inventory: Inventory) -> None:
    """Print where the account is set, if the user has several."""
    accounts = sorted({association.account for association in inventory.associations})
    if len(accounts) > 1:
        print(f"your accounts: {', '.join(accounts)}; a line in configs/account.yaml sets one")


def run() -> None:
    """Do what the command line says, and exit."""
    with errors.exit_on_config_error():
        sys.exit(main())
