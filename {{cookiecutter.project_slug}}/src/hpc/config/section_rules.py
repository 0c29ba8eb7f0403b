"""Rules on the config's own sections, each by itself: called by preflight.py, which says in what order.

Each raises `ConfigError` for the first value that it cannot do with.
"""

import math
import re

from omegaconf import DictConfig, OmegaConf

from hpc.config.errors import UNSEEN, ConfigError, nearest
from hpc.config.layout import layout
from hpc.config.sections import CheckpointConfig, ClusterConfig, FaultsConfig, RunConfig, StrategyConfig, TrainerConfig
from hpc.config.typed import flat
from hpc.config.walltime import clock, walltime

SKIPS = "an update is skipped on the device, without waiting for it, by an optimizer that is fused"
BUILT_HERE = {
    "logger": "logger= (a logger, a list of them, or null)",
    "callbacks": "a node for each below callbacks, in a file of configs/callbacks/",
    "plugins": "trainer.precision= and strategy=",
    "enable_checkpointing": "checkpoint.every_n_steps=, checkpoint.monitor= and checkpoint.keep=",
}
# Options that job scripts have by themselves, as patterns, and the key that says each.
WRITTEN = {
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
PRECISIONS = ["32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true"]


def run(run: RunConfig) -> None:
    """Names and paths that files and schedulers take."""
    name = run.name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}", name) or name in ("bash", "interactive"):
        # It names files, and the job; schedulers take no more, and Lightning treats jobs called bash as no jobs.
        other = re.sub(r"[^A-Za-z0-9._+-]+", "_", name).strip("._+-")
        rule = "is up to 100 letters, digits and . _ + -, a letter or digit first (and not bash or interactive)"
        raise ConfigError("name", repr(name), rule, f"name={other if other not in ('', name) else 'my_run'}"[:100])
    if not 0 <= run.seed < 2**32:
        rule = "must be from 0 to 4294967295, as numpy's seeds are"
        raise ConfigError("seed", run.seed, rule, f"seed={abs(run.seed) % 2**32}")
    one_of("dirty_tree", run.dirty_tree, ["snapshot", "refuse"])
    one_of("matmul_precision", run.matmul_precision, ["highest", "high", "medium"])
    if run.run_dir and (UNSEEN.search(run.run_dir) or re.search(r"[\t\n]", run.run_dir)):
        raise ConfigError("run_dir", repr(run.run_dir), "is a path of one line", "run_dir=<a directory>")
    if run.run_dir and "$" in run.run_dir:
        rule = "must be spelled out: a variable of the shell would be filled in by some writers and not by others"
        raise ConfigError("run_dir", run.run_dir, rule, "run_dir=${oc.env:NAME}/... in a file of configs/")
    if run.run_dir and (scheme := re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", run.run_dir)):
        rule = f"must be a directory of a file system, not an address ({scheme[0]})"
        raise ConfigError("run_dir", run.run_dir, rule, "run_dir=<a directory>, copied there after the run")
    if run.test_only and not run.ckpt:
        raise ConfigError(
            "test_only", True, "evaluates the weights of a checkpoint", "ckpt=<checkpoint> test_only=true"
        )


def checkpoint(node: CheckpointConfig) -> None:
    """When the state is kept."""
    for key in ("every_minutes", "every_n_steps"):
        if (value := getattr(node, key)) is not None:
            positive(f"checkpoint.{key}", value)
    at_least("checkpoint.keep", node.keep, 1)
    one_of("checkpoint.mode", node.mode, ["min", "max"])


def faults(node: FaultsConfig, strategy: StrategyConfig) -> None:
    """What becomes of a run that fails."""
    one_of("faults.nonfinite", node.nonfinite, ["stop", "skip", "rollback"])
    if node.nonfinite == "skip" and strategy.name.startswith(("deepspeed", "zero")):
        rule = f"strategy={strategy.name} cannot skip an update: DeepSpeed owns the optimizer step"
        raise ConfigError("faults.nonfinite", "skip", rule, "faults.nonfinite=stop, or rollback")
    positive("faults.hang_minutes", node.hang_minutes)
    at_most("faults.hang_minutes", node.hang_minutes, 60 * 24 * 365)  # timers take no more than some hundred years
    at_least("faults.retries", node.retries, 1)


def skipping(cfg: DictConfig) -> None:
    """The optimizer of the shipped models can leave a step out; of another model it shows at the first step."""
    optimizer = OmegaConf.select(cfg, "model.optimizer")
    if cfg.faults.nonfinite == "skip" and optimizer is not None and not optimizer.get("fused"):
        word = "model.optimizer.fused=true"
        fix = f"{word if 'fused' in optimizer else '+' + word}, or faults.nonfinite=rollback"
        raise ConfigError("faults.nonfinite", "skip", SKIPS, fix)


def cluster(cluster: ClusterConfig, cfg: DictConfig) -> None:
    """What a scheduler is asked for, and what stands in a job script."""
    if cluster.scheduler is not None:
        one_of("cluster.scheduler", cluster.scheduler, ["slurm", "pbs"])
    for key in ("account", "partition", "qos", "constraint", "interface"):
        if re.search(r"[^!-~]|[\"'`\\$#;]", getattr(cluster, key) or ""):
            rule = "is one word as the scheduler lists it, without quotes"
            raise ConfigError(f"cluster.{key}", repr(getattr(cluster, key)), rule, f"cluster.{key}=<{key}>")
    login_host(cluster.login_host)
    lines = [("options", line) for line in cluster.options] + [("setup", line) for line in cluster.setup]
    words = ("request", "launcher", "container", "node_local", "cache", "master_addr_suffix")
    for key, line in [*lines, *((word, getattr(cluster, word) or "") for word in words)]:
        if not isinstance(line, str) or UNSEEN.search(line) or "\n" in line:
            rule = "must be text of one line, without control characters; options and setup are lists of such lines"
            raise ConfigError(f"cluster.{key}", repr(line), rule, "one list entry per line")
    options(cluster)
    for key, value in cluster.env.items():
        damages = re.search(r'["`\\\n]|\$\(', str(value)) or UNSEEN.search(str(value))
        if not re.fullmatch(r"[A-Za-z_]\w*", str(key)) or damages:
            rule = "is NAME: value; the value stands between double quotes in the job script, $VARIABLES are filled in"
            raise ConfigError(f"cluster.env.{key}", repr(value), rule, "leave out quotes, backslashes and commands")
    asked = walltime("cluster.time", cluster.time)
    if cluster.max_time and asked > (most := walltime("cluster.max_time", cluster.max_time)):
        rule = f"cluster={cluster.name} lets a job run {cluster.max_time}"
        raise ConfigError("cluster.time", cluster.time, rule, f"cluster.time={clock(most)}")
    for key in ("chain", "rendezvous_seconds"):
        at_least(f"cluster.{key}", getattr(cluster, key), 1)
    if cluster.scheduler == "slurm" and cluster.chain > 1:
        rule = "is for PBS: Slurm itself starts a job again that has not finished its run"
        raise ConfigError("cluster.chain", cluster.chain, rule, "cluster.chain=1")
    workers, cores = OmegaConf.select(cfg, "data.num_workers") or 0, cluster.cores_per_gpu
    if cluster.scheduler and cores and workers > cores:
        rule = f"a task on {cluster.name} has {cores} cores (cluster.cores_per_gpu)"
        raise ConfigError("data.num_workers", workers, rule, f"data.num_workers={max(cores - 1, 1)}")


def options(cluster: ClusterConfig) -> None:
    """One that a job script already has would win over it as the later one, and nothing else would know of it."""
    for line in cluster.options:
        if key := written_by(line, cluster.scheduler):
            rule = "is what the job script already says; the later one would win, and nothing else would know of it"
            raise ConfigError("cluster.options", line, rule, f"{key}, and without this option")


def written_by(option: str, scheduler: str | None) -> str | None:
    """The key of the config by which job scripts have this option; None where they do not have it."""
    for words, key in WRITTEN.get(scheduler or "", {}).items():
        if any(re.match(word if len(word) == 2 else rf"{word}(?![\w-])", option) for word in words.split("|")):
            return key
    return None


def login_host(host: str | None) -> None:
    """It stands in a line that people copy into a shell of theirs."""
    if host and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", host):
        rule = "is the name of a machine, as ssh takes it: letters, digits, dots and dashes"
        raise ConfigError("cluster.login_host", repr(host), rule, "cluster.login_host=<a name, without user@>")


def trainer(trainer: TrainerConfig, cluster: ClusterConfig) -> None:
    """Sizes that the cluster has, and arithmetic that the devices can do."""
    one_of("trainer.accelerator", trainer.accelerator, ["cpu", "gpu"])
    one_of("trainer.precision", trainer.precision, PRECISIONS)
    if trainer.devices is None:
        rule = f"cluster={cluster.name} does not say how many GPUs a node has"
        raise ConfigError("trainer.devices", "null", rule, "trainer.devices=<devices per node>")
    for key in ("num_nodes", "devices", "accumulate_grad_batches", "log_every_n_steps"):
        at_least(f"trainer.{key}", getattr(trainer, key), 1)
    if trainer.check_val_every_n_epoch is not None:
        at_least("trainer.check_val_every_n_epoch", trainer.check_val_every_n_epoch, 1)
    at_least("trainer.max_steps", trainer.max_steps, -1)
    at_least("trainer.gradient_clip_val", trainer.gradient_clip_val or 0, 0)
    one_of("trainer.gradient_clip_algorithm", trainer.gradient_clip_algorithm or "norm", ["norm", "value"])
    if cluster.max_nodes and trainer.num_nodes > cluster.max_nodes:
        rule = f"cluster={cluster.name} has {cluster.max_nodes} node{'s' * (cluster.max_nodes > 1)}"
        raise ConfigError(
            "trainer.num_nodes", trainer.num_nodes, rule, f"trainer.num_nodes={cluster.max_nodes} or another cluster="
        )
    gpus = cluster.gpus_per_node
    if trainer.accelerator == "gpu" and gpus and trainer.devices > gpus:
        rule = f"a node of cluster={cluster.name} has {gpus} GPUs"
        raise ConfigError("trainer.devices", trainer.devices, rule, f"trainer.devices={gpus}")
    if trainer.accelerator == "cpu" and trainer.precision.startswith("16"):
        # Lightning would train in bf16 instead and only warn: that is another number than the one asked for.
        raise ConfigError(
            "trainer.precision", trainer.precision, "CPUs train in 32, 64 or bf16", "trainer.precision=bf16-mixed"
        )


def built_here(trainer: DictConfig) -> None:
    """What train.py gives the Trainer itself: a second one would be left out."""
    for key, fix in BUILT_HERE.items():
        if key in trainer:
            rule = "must be left out, as train.py builds it from another part of the config"
            raise ConfigError(f"trainer.{key}", ascii(trainer[key]), rule, fix)


def monitor(cfg: DictConfig) -> None:
    """How often the nodes are sampled."""
    key = "callbacks.monitor.every_seconds"
    if isinstance(seconds := OmegaConf.select(cfg, key), int | float):  # else it is told with other arguments
        positive(key, seconds)
        at_least(key, seconds, 1)


def loggers(cfg: DictConfig) -> None:
    """Their words name folders, and stand in the progress bar."""
    for key, value in flat(cfg).items():
        if key.startswith("logger") and isinstance(value, str) and UNSEEN.search(value):
            raise ConfigError(key, repr(value), "must have no control characters", f"{key}={UNSEEN.sub('', value)}")


def batch(cfg: DictConfig) -> None:
    """The global batch is shared out without a rest."""
    size = cfg.data.global_batch_size
    if not isinstance(size, int):
        raise ConfigError("data.global_batch_size", size, "is of type int", "data.global_batch_size=64")
    at_least("data.global_batch_size", size, 1)
    shares = layout(cfg).data_parallel_size * cfg.trainer.accumulate_grad_batches
    if size % shares:
        below, above = size // shares * shares, -(-size // shares) * shares
        rule = f"divides by data-parallel size * accumulate_grad_batches = {shares}"
        fix = " or ".join(f"data.global_batch_size={n}" for n in (below, above) if n)
        raise ConfigError("data.global_batch_size", size, rule, fix)


def one_of(key: str, value: str, choices: list[str]) -> None:
    if value not in choices:
        raise ConfigError(key, value, f"is one of {', '.join(choices)}", f"{key}={nearest(value, choices, choices[0])}")


def at_least(key: str, value: float, least: int) -> None:
    if value < least:
        raise ConfigError(key, value, f"is at least {least}", f"{key}={max(least, 1)}")


def at_most(key: str, value: float, most: int) -> None:
    if value > most:
        raise ConfigError(key, value, f"must be at most {most}", f"{key}={most}")


def positive(key: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(key, value, "is a number above 0", f"{key}=10")
