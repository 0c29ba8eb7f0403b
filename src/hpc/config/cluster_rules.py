"""Rules on the section `cluster`: what a scheduler is asked for, and what stands in a job script.

Each raises `ConfigError` for the first value that breaks it.
"""

import re

from omegaconf import DictConfig, OmegaConf

from hpc.config.errors import CONTROL_CHARACTERS, ConfigError, require_at_least, require_one_of
from hpc.config.sections import ClusterConfig
from hpc.config.walltime import format_walltime, walltime_seconds

# The options that every job script has, as patterns, and the key of the config that sets each.
SCRIPT_OPTIONS = {
    "slurm": {
        "--nodes|-N": "trainer.num_nodes=",
        "--ntasks|-n|--ntasks-per-node|--gpus|-G|--gpus-per-node": "trainer.devices=",
        "--cpus-per-task|-c": "cluster.cores_per_gpu=",
        "--time|-t": "cluster.time=",
        "--mem": "cluster.memory_gb=",
        "--account|-A": "cluster.account=",
        "--partition|-p": "cluster.partition=",
        "--qos|-q": "cluster.qos=",
        "--constraint|-C": "cluster.constraint=",
        "--job-name|-J": "name=",
        "--array|-a": "submit.py --multirun",
        "--output|-o|--open-mode": "run_dir=",
        "--requeue|--no-requeue": "faults.retries=",
        "--signal": "checkpoint.every_minutes=",
    },
    "pbs": {
        "-l *select": "trainer.num_nodes=, trainer.devices=",
        "-l *walltime": "cluster.time=",
        "-A": "cluster.account=",
        "-q": "cluster.partition=",
        "-N": "name=",
        "-J": "submit.py --multirun",
        "-o|-j|-k|-e": "run_dir=",
        "-r": "faults.retries=",
    },
}
WORD_KEYS = ("name", "account", "partition", "qos", "constraint", "interface")
LINE_KEYS = ("request", "launcher", "container", "node_local", "cache", "master_addr_suffix")
# $NAME or ${NAME}, and what `cluster_for_job_script` writes for ${oc.env:NAME} and ${oc.env:NAME,default}.
BASH_VARIABLE = r'\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*(?:[?-][^"`\\${}]*)?\}'


def check_cluster(cluster: ClusterConfig, cfg: DictConfig) -> None:
    """Check the whole section."""
    if cluster.scheduler is not None:
        require_one_of("cluster.scheduler", cluster.scheduler, choices=["slurm", "pbs"])
    _check_one_word_keys(cluster)
    check_login_host(cluster.login_host)
    _check_one_line_keys(cluster)
    check_node_local(cluster.node_local)
    _check_options(cluster)
    _check_environment(cluster)
    _check_time(cluster)
    _check_launcher(cluster)
    for key in ("chain", "rendezvous_seconds"):
        require_at_least(f"cluster.{key}", getattr(cluster, key), minimum=1)
    if cluster.scheduler == "slurm" and cluster.chain > 1:
        rule = "must be 1 on Slurm, which itself requeues a job that has not finished its run"
        raise ConfigError("cluster.chain", cluster.chain, rule, "cluster.chain=1")
    num_workers, num_cores = OmegaConf.select(cfg, "data.num_workers"), cluster.cores_per_gpu
    if cluster.scheduler and num_cores and isinstance(num_workers, int) and num_workers > num_cores:
        rule = f"must be at most {num_cores}, the cores of a task on cluster={cluster.name} (cluster.cores_per_gpu)"
        raise ConfigError("data.num_workers", num_workers, rule, f"data.num_workers={max(num_cores - 1, 1)}")


def check_login_host(host: str | None) -> None:
    """Check the name of the login node. It stands in a line that people copy into their shells."""
    if host and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", host):
        rule = "must be the name of a machine, as ssh takes it: letters, digits, dots and dashes"
        raise ConfigError("cluster.login_host", repr(host), rule, "cluster.login_host=<a name, without user@>")


def key_of_option(option: str, scheduler: str | None) -> str | None:
    """Return the key of the config that sets an option of all job scripts; None if they do not have this option."""
    for patterns, key in SCRIPT_OPTIONS.get(scheduler or "", {}).items():
        for pattern in patterns.split("|"):
            if re.match(pattern if len(pattern) == 2 else rf"{pattern}(?![\w-])", option):
                return key
    return None


def _check_one_word_keys(cluster: ClusterConfig) -> None:
    for key in WORD_KEYS:
        word = getattr(cluster, key) or ""
        if re.search(r"[^!-~]|[\"'`\\$#;]", word):
            rule = "must be one word as the scheduler lists it, without quotes"
            raise ConfigError(f"cluster.{key}", repr(word), rule, f"cluster.{key}=<{key}>")


def _check_one_line_keys(cluster: ClusterConfig) -> None:
    """Check the values that become lines of a job script, or parts of one."""
    lines: list[tuple[str, object]] = [("options", line) for line in cluster.options]
    lines += [(key, getattr(cluster, key) or "") for key in LINE_KEYS]
    for key, line in lines:
        if not isinstance(line, str) or CONTROL_CHARACTERS.search(line) or "\n" in line:
            rule = "must be text of one line, without control characters; options is a list of such lines"
            raise ConfigError(f"cluster.{key}", repr(line), rule, "one list entry per line")


def check_node_local(folder: str | None) -> None:
    """Check the folder on a node. It stands between double quotes in job scripts, and bash must run nothing in it."""
    plain, text = None, folder or ""
    while text != plain:  # from the inside out: a default of `${oc.env:}` may be another variable
        plain, text = text, re.sub(BASH_VARIABLE, "", text, flags=re.ASCII)
    if re.search(r'["`\\$]', text):
        rule = "must be a folder, in which $NAME or ${NAME} stands for an environment variable"
        raise ConfigError("cluster.node_local", repr(folder), rule, "cluster.node_local='$TMPDIR'")


def _check_options(cluster: ClusterConfig) -> None:
    """Check that no option repeats one of the job script.

    The scheduler would obey the later one, and the rest of the config would not follow.
    """
    for option in cluster.options:
        if key := key_of_option(option, cluster.scheduler):
            rule = f"must not set what the job script already has from {key.rstrip('=')}"
            raise ConfigError("cluster.options", option, rule, f"{key}, and without this option")


def _check_environment(cluster: ClusterConfig) -> None:
    for name, value in cluster.env.items():
        ends_quotes = re.search(r'["`\\\n]|\$\(', str(value)) or CONTROL_CHARACTERS.search(str(value))
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name)) or ends_quotes:
            rule = "must be NAME: value, with a value that can stand between double quotes in the job script"
            fix = "leave out quotes, backslashes and commands; $VARIABLES are expanded"
            raise ConfigError(f"cluster.env.{name}", repr(value), rule, fix)


def _check_launcher(cluster: ClusterConfig) -> None:
    """Check that PBS's launcher starts the ranks themselves; until version 0.3 it started one process per node."""
    if cluster.scheduler == "pbs" and cluster.launcher != "pbs_tmrsh" and "{ranks}" not in cluster.launcher:
        rule = "must start one process per device: pbs_tmrsh, or a command of the site with {ranks}, their number"
        fix = "cluster.launcher=pbs_tmrsh, or 'mpiexec -n {ranks} --ppn {tasks}' in the cluster's file"
        raise ConfigError("cluster.launcher", cluster.launcher, rule, fix)


def _check_time(cluster: ClusterConfig) -> None:
    seconds = walltime_seconds("cluster.time", cluster.time)
    if cluster.max_time and seconds > (max_seconds := walltime_seconds("cluster.max_time", cluster.max_time)):
        rule = f"must be at most {cluster.max_time}, the longest time of a job on cluster={cluster.name}"
        raise ConfigError("cluster.time", cluster.time, rule, f"cluster.time={format_walltime(max_seconds)}")
