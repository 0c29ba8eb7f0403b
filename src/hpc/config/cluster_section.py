"""The section `cluster` of the config, as sections.py has the others, with its rules.

They are about what a scheduler is asked for, and what stands in a job script.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

from hpc.config.errors import CONTROL_CHARACTERS, ConfigError, closest_word, raise_problems
from hpc.config.value_rules import at_least, one_of
from hpc.config.walltime import walltime_seconds

Problems = Iterator[ConfigError | None]

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
        "--mail-user|--mail-type": "cluster.mail=, cluster.mail_on=",
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
        "-M|-m": "cluster.mail=, cluster.mail_on=",
    },
}
MAIL_EVENTS = ("begin", "end", "fail")
WORD_KEYS = ("name", "account", "partition", "qos", "constraint", "interface")
LINE_KEYS = ("request", "launcher", "container", "node_local", "cache", "master_addr_suffix")
# $NAME or ${NAME}, and what stands there for ${oc.env:NAME} and ${oc.env:NAME,default}.
BASH_VARIABLE = r'\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*(?:[?-][^"`\\${}]*)?\}'


@dataclass
class ClusterConfig:
    """The machine, and what its scheduler is asked for. Leave a key null if its value is unknown.

    Each file in a project's configs/cluster/ begins with `defaults: [base]` and sets what differs.
    `python tools/cluster.py NAME`, typed on a login node, writes one for your cluster. NAME.sh beside it, if there is
    one, is sourced by env.sh and by jobs: module load ...
    """

    name: str = "base"  # the name of the file
    scheduler: str | None = None  # slurm, pbs, or null for none
    required: list[str] = field(default_factory=list)  # keys that a job needs; submit.py lists those that are null

    account: str | None = None  # charged for the GPU hours; default: the one of configs/account.yaml
    partition: str | None = None  # with PBS: the queue
    qos: str | None = None  # quality of service
    constraint: str | None = None  # features that nodes must have, as for Slurm's --constraint
    time: str = "1:00:00"  # wall time of a job, "H:MM:SS" or "D-HH:MM:SS", always in quotes
    login_host: str | None = None  # for ssh

    accelerator: str = "gpu"  # default of trainer.accelerator: gpu or cpu
    gpus_per_node: int | None = None  # as torch counts them: an MI250X counts twice
    gpu: str | None = None  # its name in hpc/jobs/hardware.yaml: A100, H100; used by plan.py, as are the next two
    gpu_link_gbs: float | None = None  # GB/s that a GPU sends to the others of its node; null: nominal, of that GPU
    network_gbs: float | None = None  # nominal GB/s that a node sends, all adapters: 4 of 200 Gb/s make 100
    cores_per_gpu: int | None = None  # CPUs per GPU, as the scheduler counts them: cores or hardware threads
    # option that requests GPUs; {gpus} and {cores} are those of a node; null: none. slurm: "--gres=gpu:{gpus}"; pbs,
    # after "select=N:": "ncpus={cores}:ngpus={gpus}:mpiprocs=1"
    request: str | None = None
    memory_gb: int | None = None  # GB per node; a job gets its GPUs' share; 0: all (--mem=0); null: request none
    exclusive: bool = False  # request whole nodes if a job uses all their GPUs; false if nodes are never shared
    # a job gets whole nodes, whatever it requests: idle GPUs are counted, and with slurm runs of a sweep share nodes
    whole_nodes: bool = False
    options: list[str] = field(default_factory=list)  # more options of sbatch or qsub: "-l filesystems=home:eagle"

    mail: str | None = None  # address to which the scheduler writes about each job; null: none
    # when it writes: begin, end, fail; with pbs, fail means that PBS aborts the job, and end tells the exit code
    mail_on: list[str] = field(default_factory=lambda: ["end", "fail"])

    # slurm: srun with the site's options; every task must see all GPUs of its node. pbs: pbs_tmrsh, which every PBS
    # has, or the site's: "mpiexec -n {ranks} --ppn {tasks} --cpu-bind none". {ranks}: processes in all; {tasks}: on a
    # node, one per device
    launcher: str = "srun"
    container: str | None = None  # prefix of `python`: "apptainer exec --nv my.sif", "conda run -p DIR"; null: env.sh
    # exported last in the job; values without double quotes, backticks or backslashes. KEY: "${oc.env:KEY}" stays a
    # variable in the script; on PBS nodes only NAME.sh can set it
    env: dict[str, str] = field(default_factory=dict)
    interface: str | None = None  # network interface between nodes, one exact name; sets NCCL_ and GLOO_SOCKET_IFNAME
    master_addr_suffix: str = ""  # appended to the first node's name
    rendezvous_seconds: int = 300  # how long ranks wait for each other
    node_local: str | None = None  # a node's own storage, deleted after a job; may contain $VARIABLES: "$SLURM_TMPDIR"
    cache: str = "~/.cache"  # a folder that all nodes see, for results of torch.compile; may contain a job's $VARIABLES
    stage_env: bool = False  # copy the environment to node_local before the run
    chain: int = 1  # pbs: number of jobs to queue one after the other; each runs only if the run is not finished

    def __post_init__(self) -> None:
        raise_problems(_problems(self))


def unknown_keys_error(keys: Sequence[str], *, prefix: str, file: str) -> ConfigError | None:
    """Return one error for all keys of a file that clusters do not have; None if it has no such key.

    Args:
        prefix: of the keys in the message.
        file: from which a person can remove them.
    """
    known = [key.name for key in fields(ClusterConfig)]
    unknown = [key for key in keys if key not in known]
    similar = dict.fromkeys(closest_word(key, known, "") for key in unknown)
    hint = f" (similar: {', '.join(filter(None, similar))})" if any(similar) else ""
    rule = f"cannot be set, as clusters have no such key{'s' * (len(unknown) > 1)}{hint}"
    fix = f"{file} without {'them' if len(unknown) > 1 else 'it'}; python train.py --help cluster explains all keys"
    return ConfigError(", ".join(f"{prefix}{key}" for key in unknown), None, rule, fix) if unknown else None


def _problems(cluster: ClusterConfig) -> Problems:
    """Yield the errors of the section."""
    yield one_of("cluster.scheduler", cluster.scheduler, ["slurm", "pbs"])
    yield from _word_problems(cluster)
    yield _login_host_problem(cluster.login_host)
    yield from _mail_problems(cluster)
    yield from _line_problems(cluster)
    yield _node_local_problem(cluster.node_local)
    yield from _option_problems(cluster)
    yield from _environment_problems(cluster)
    yield _time_problem(cluster.time)
    yield _launcher_problem(cluster)
    for key in ("chain", "rendezvous_seconds"):
        yield at_least(f"cluster.{key}", getattr(cluster, key), 1)
    if cluster.scheduler == "slurm" and (cluster.chain or 1) > 1:
        rule = "must be 1 on Slurm, which itself requeues a job that has not finished its run"
        yield ConfigError("cluster.chain", cluster.chain, rule, "cluster.chain=1")


def _login_host_problem(host: str | None) -> ConfigError | None:
    """Return the error of a name of a login node. It stands in a line that people copy into their shells."""
    if host and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", host):
        rule = "must be the name of a machine, as ssh takes it: letters, digits, dots and dashes"
        return ConfigError("cluster.login_host", repr(host), rule, "cluster.login_host=<a name, without user@>")
    return None


def _mail_problems(cluster: ClusterConfig) -> Problems:
    """Yield the errors of the address, which stands in a job script, and of the events."""
    if cluster.mail and not re.fullmatch(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9][A-Za-z0-9.-]*", cluster.mail):
        rule = "must be one mail address: letters, digits and ._%+- around one @"
        yield ConfigError("cluster.mail", repr(cluster.mail), rule, "cluster.mail=<name@site>")
    for event in cluster.mail_on or ():
        if event not in MAIL_EVENTS:
            rule = f"must be a list of {', '.join(MAIL_EVENTS)}"
            yield ConfigError("cluster.mail_on", repr(event), rule, "cluster.mail_on=[end,fail]")


def _key_of_option(option: str, scheduler: str | None) -> str | None:
    """Return the key of the config that sets an option of all job scripts; None if they do not have this option."""
    for patterns, key in SCRIPT_OPTIONS.get(scheduler or "", {}).items():
        for pattern in patterns.split("|"):
            if re.match(pattern if len(pattern) == 2 else rf"{pattern}(?![\w-])", option):
                return key
    return None


def _word_problems(cluster: ClusterConfig) -> Problems:
    for key in WORD_KEYS:
        word = getattr(cluster, key) or ""
        if re.search(r"[^!-~]|[\"'`\\$#;]", word):
            rule = "must be one word as the scheduler lists it, without quotes"
            yield ConfigError(f"cluster.{key}", repr(word), rule, f"cluster.{key}=<{key}>")


def _line_problems(cluster: ClusterConfig) -> Problems:
    """Yield the errors of values that become lines of a job script, or parts of one."""
    lines: list[tuple[str, object]] = [("options", line) for line in cluster.options or ()]
    lines += [(key, getattr(cluster, key) or "") for key in LINE_KEYS]
    for key, line in lines:
        if not isinstance(line, str) or CONTROL_CHARACTERS.search(line) or "\n" in line:
            rule = "must be text of one line, without control characters; options is a list of such lines"
            yield ConfigError(f"cluster.{key}", repr(line), rule, "one list entry per line")


def _node_local_problem(folder: str | None) -> ConfigError | None:
    """Return the error of a folder on a node. It stands between double quotes, and bash must run nothing in it."""
    plain, text = None, folder or ""
    while text != plain:  # from the inside out: a default of `${oc.env:}` may be another variable
        plain, text = text, re.sub(BASH_VARIABLE, "", text, flags=re.ASCII)
    if re.search(r'["`\\$]', text):
        rule = "must be a folder, in which $NAME or ${NAME} stands for an environment variable"
        return ConfigError("cluster.node_local", repr(folder), rule, "cluster.node_local='$TMPDIR'")
    return None


def _option_problems(cluster: ClusterConfig) -> Problems:
    """Yield the errors of options that repeat one of the job script.

    The scheduler would obey the later one, and the rest of the config would not follow.
    """
    for option in filter(lambda option: isinstance(option, str), cluster.options or ()):
        if key := _key_of_option(option, cluster.scheduler):
            rule = f"must not set what the job script already has from {key.rstrip('=')}"
            yield ConfigError("cluster.options", option, rule, f"{key}, and without this option")


def _environment_problems(cluster: ClusterConfig) -> Problems:
    for name, value in (cluster.env or {}).items():
        ends_quotes = re.search(r'["`\\\n]|\$\(', str(value)) or CONTROL_CHARACTERS.search(str(value))
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name)) or ends_quotes:
            rule = "must be NAME: value, with a value that can stand between double quotes in the job script"
            fix = "leave out quotes, backslashes and commands; $VARIABLES are expanded"
            yield ConfigError(f"cluster.env.{name}", repr(value), rule, fix)


def _launcher_problem(cluster: ClusterConfig) -> ConfigError | None:
    """Return the error of a launcher of PBS that does not start one process for each device."""
    launcher = cluster.launcher
    if cluster.scheduler != "pbs" or launcher in (None, "pbs_tmrsh") or "{ranks}" in launcher:
        return None
    rule = "must start one process per device: pbs_tmrsh, or a command of the site with {ranks}, their number"
    fix = "cluster.launcher=pbs_tmrsh, or 'mpiexec -n {ranks} --ppn {tasks}' in the cluster's file"
    return ConfigError("cluster.launcher", launcher, rule, fix)


def _time_problem(time: str | None) -> ConfigError | None:
    """Return the error of a text that is no wall time. How long a job may last, submit.py asks the scheduler."""
    try:
        walltime_seconds("cluster.time", time if time is not None else "1:00:00")
    except ConfigError as error:
        return error
    return None
