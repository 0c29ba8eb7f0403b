"""Cases: hostile command lines, variables and configs, and the program that reads them."""

import random
import shutil
from pathlib import Path
from typing import Any

import yaml

from trial.hostile import folders, training, values
from trial.hostile.case import Case, Draw, Ground
from trial.hostile.damage import damage

OF_EACH_TYPE = ["text", "7", "-1.5", "true", "null", "[]", "[1,x]", "{}", "{a:1}", "[[1],{a:null}]"]
LEAVES: list[str] = []  # dotted keys of the config, filled in by programs.py
GROUPS: dict[str, list[str]] = {}


def overrides(rng: random.Random, ground: Ground) -> Case:
    """Return a case with hostile values, keys and whole words on the command line."""
    words = []
    for _ in range(rng.randrange(1, 4)):
        key, value = rng.choice(LEAVES), values.text(rng, ground.canary)
        sign, above = rng.choice(["", "", "", "+", "++", "~"]), key.rpartition(".")[0] or key
        form = rng.choices(range(9), [5, 4, 1, 1, 1, 1, 1, 0.5, 6])[0]
        words.append(
            [
                f"{sign}{key}={value}",
                f"{sign}{key}={training.odd(rng, rng.choice([1, 0.5, True, [1], 'x']), ground)}",
                f"{value}={rng.choice(values.NUMBERS)}",
                f"{sign}{rng.choice(list(GROUPS))}{rng.choice(['', '@x', '@_global_'])}={value}",
                f"~{rng.choice([key, above])}",
                f"{sign}{above}={value}",
                rng.choice(HYDRAS).replace("VALUE", value),
                value,
                f"{key}={rng.choice(OF_EACH_TYPE)}",
            ][form]
        )
    program, first = rng.choice(
        [("train.py", "--cfg=job"), ("train.py", ""), ("plan.py", ""), *[("submit.py", "--dry-run")] * 2]
    )
    more = ["cluster=slurm", "cluster.account=a"] if program == "submit.py" else []
    if program == "submit.py" and rng.random() < 0.4:
        more[0] = "cluster=pbs"
    if program == "submit.py":
        more.append(f"run_dir={ground.open}/run")
    case = Case(program, [*filter(None, [first]), *more, *words], inspect="bash" if program == "submit.py" else "")
    case.scripted = scripted(rng, ground)
    return case


def scripted(rng: random.Random, ground: Ground) -> dict[str, str]:
    """Return a case in which a job script runs with hostile environment variables."""
    if rng.random() < 0.3:
        return {}
    return {name: values.text(rng, ground.canary) for name in rng.sample(IN_JOBS, rng.randrange(1, 4))}


IN_JOBS = [
    "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_END_TIME",
    "SLURM_JOB_NODELIST", "SLURM_SUBMIT_DIR", "PBS_JOBID", "PBS_NODEFILE", "PBS_O_WORKDIR", "PBS_ARRAY_INDEX",
    "PBS_JOBNAME", "HPC_AFTER", "HPC_RUN_DIR", "HPC_JOB_END", "HOME", "TMPDIR", "USER", "VENV", "LANG", "HOSTNAME",
    "IFS", "CDPATH", "MASTER_PORT", "SCRATCH", "status", "stalled", "retries", "job", "end", "rank", "run_dir",
]  # fmt: skip


# Keys of Hydra, and arguments that Hydra would interpret.
HYDRAS = [
    "hydra.run.dir=VALUE", "hydra.searchpath=[file://VALUE]", "hydra/launcher=VALUE", "hydra.job.chdir=true",
    "--config-dir=VALUE", "--config-name=VALUE", "-cd", "--info", "--multirun", "-m", "--resolve", "--package=VALUE",
    "+hydra.callbacks={x: VALUE}", "resume=VALUE", "run_dir=VALUE", "name=VALUE", "ckpt=VALUE", "experiment=VALUE",
]  # fmt: skip
# Values that a user could type, some of them rare.
CLUSTER: dict[str, list[Any]] = {
    "account": ["a+b.c@d", "p_1", "0123"], "partition": ["a,b", "gpu"], "qos": ["normal", None],
    "constraint": ["a&b|c", None],
    "time": ["1-00", "0:00:01", "90", "00:30:00"], "gpus_per_node": [1, 4, 8],
    "cores_per_gpu": [None, 1, 128], "request": [None, "--gres=gpu:{gpus}", "ncpus={cores}:ngpus={gpus}"],
    "memory_gb": [None, 0, 1, 10**6], "interface": ["ib0", None], "master_addr_suffix": ["", "-ib", ".x"],
    "chain": [1, 3], "login_host": ["a.b", None], "exclusive": [True, False],
    "node_local": [None, "$TMPDIR", "/a b"], "cache": ["~/x", "$SCRATCH/é"], "rendezvous_seconds": [1, 300],
    "setup": [[], ["true", ": 'a b'"]], "launcher": ["srun", "srun --mpi=none"], "container": [None, "env A=b"],
    "stage_env": [False, True], "env": [{}, {"A": "$HOME/x"}, {"A": "a b", "B": "'*' & | ; < é"}],
}  # fmt: skip


def cluster_values(rng: random.Random, ground: Ground) -> Case:
    """Return a case with hostile values of a cluster's file in a job script, except for keys that hold bash code."""
    content: dict[str, Any] = {"defaults": ["slurm" if rng.random() < 0.5 else "pbs"], "account": "a"}
    content |= {key: rng.choice(CLUSTER[key]) for key in rng.sample(list(CLUSTER), rng.randrange(8))}
    bash = ("setup", "launcher", "container", "env")  # commands; env is drawn below
    for key in rng.sample([key for key in CLUSTER if key not in bash], rng.choice([0, 1, 1, 1, 2])):
        content[key] = values.text(rng, ground.canary) if rng.random() < 0.7 else values.data(rng, ground.canary)
    if rng.random() < 0.3:
        name = rng.choice(["KEY", "KEY", values.text(rng, ground.canary)])
        content["env"] = {name: values.text(rng, ground.canary)}
    if rng.random() < 0.2:
        content["options"] = [values.data(rng, ground.canary)]
    configs = _configs(ground)
    _yaml(configs / "cluster/hostile.yaml", content, rng)
    words = ["--dry-run", "cluster=hostile", f"run_dir={ground.open}/run"]
    return Case("submit.py", words, configs=configs, inspect="bash", scripted=scripted(rng, ground))


def config_files(rng: random.Random, ground: Ground) -> Case:
    """Return a case with a hostile config file of any group."""
    configs = _configs(ground)
    files = sorted(file for file in configs.rglob("*.yaml") if file.parent.name != "cluster" or file.stem == "base")
    file = rng.choice(files)
    if rng.random() < 0.25:
        damage(rng, file, ground.canary, ground.folder / "victim")
    else:
        content = yaml.safe_load(file.read_text()) or {}
        _yaml(file, values.changed(rng, content, ground.canary), rng)
    group = [f"{file.parent.name}={file.stem}"] if file.parent != configs and file.stem != "base" else []
    return Case(
        rng.choice(["train.py", "submit.py"]), ["--cfg=job", *group] if rng.random() < 0.3 else group, configs=configs
    )


def personal(rng: random.Random, ground: Ground) -> Case:
    """Return a case with a hostile personal clusters.yaml."""
    file = ground.folder / "open" / "clusters.yaml"
    content: Any = {"slurm": {"account": "mine", "partition": "p", "env": {"A": "b"}}, "local": {"time": "1:00:00"}}
    file.write_text(yaml.safe_dump(content))
    if rng.random() < 0.6:
        _yaml(file, values.changed(rng, content, ground.canary), rng)
    else:
        damage(rng, file, ground.canary, ground.folder / "victim")
    words = ["--dry-run", "cluster=slurm", f"run_dir={ground.open}/run"]
    return Case("submit.py", words, personal=file, inspect="bash")


LAUNCH = {
    "srun": [
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_STEP_NODELIST",
        "SLURM_NODEID",
        "SLURMD_NODENAME",
    ],
    "torchrun": [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
        "MASTER_ADDR",
        "MASTER_PORT",
    ],
    "mpich": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MASTER_ADDR", "MASTER_PORT"],
    "openmpi": [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "pals": ["PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"],
    "pbs": ["PBS_JOBID", "PBS_ENVIRONMENT", "PBS_NODEFILE", "PBS_O_WORKDIR", "PBS_ARRAY_INDEX"],
    "tmrsh": ["HPC_RANK", "HPC_WORLD_SIZE", "HPC_LOCAL_RANK", "HPC_LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"],
    "array": ["SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "SLURM_PROCID"],
}
OTHERS = [
    "HPC_RUN_DIR",
    "HPC_JOB_END",
    "HPC_BEGUN",
    "HPC_AFTER",
    "VENV",
    "CUDA_VISIBLE_DEVICES",
    "SLURM_HET_SIZE",
    "NODE_RANK",
    "LOCAL_RANK",
    "SLURM_CPUS_PER_TASK",
    "SLURM_RESTART_COUNT",
    "HOME",
    "TMPDIR",
    "COLUMNS",
    "TERM",
    "LANG",
    "USER",
    "PATH",
    "XDG_CONFIG_HOME",
    "OMP_NUM_THREADS",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GLOO_SOCKET_IFNAME",
]


def environment(rng: random.Random, ground: Ground) -> Case:
    """Return a case with hostile values of the variables that launchers and schedulers set."""
    environ = {name: rng.choice(["0", "1", "1", "2"]) for name in LAUNCH[rng.choice(list(LAUNCH))]}
    for name in rng.sample([*environ, *OTHERS], rng.randrange(1, 4)):
        environ[name] = values.text(rng, ground.canary)
        if rng.random() < 0.15:
            environ.pop(name)
    words = rng.choice([[], ["cluster=slurm", "trainer.devices=1"], ["trainer.num_nodes=1", "trainer.devices=1"]])
    program = rng.choice(["train.py", "train.py", "submit.py", "tunnel"])
    return Case(program, ["--dry-run", "cluster=slurm"] if program == "submit.py" else words, environ)


def words_of_tools(rng: random.Random, ground: Ground) -> Case:
    """Return a case with hostile arguments of the tools or of report.py."""
    program = rng.choice(["report.py", "tools/board.py", "tools/export.py", "tools/pack.py", "load", "weights"])
    count = {"load": 1, "weights": 1}.get(program, rng.randrange(1, 4))
    words = [values.text(rng, ground.canary) for _ in range(count)]
    if program == "tools/pack.py":
        keys = ["out", "tokenizer", "data.files", "data.dir", "data.image_size", "--verify"]
        words = [f"{rng.choice(keys)}={word}" for word in words]
    if program == "tools/board.py" and rng.random() < 0.5:
        words = [f"{rng.choice(['cluster', 'cluster.login_host', 'cluster.name'])}={word}" for word in words]
    return Case(program, words)


def answers(rng: random.Random, ground: Ground) -> Case:
    """Return a case with hostile answers to cookiecutter."""
    keys = ["project_name", "project_slug", "package_name", "description", "author", "license", "cluster", "account"]
    return Case("bake", [f"{key}={values.text(rng, ground.canary)}" for key in rng.sample(keys, rng.randrange(1, 3))])


def _configs(ground: Ground) -> Path:
    return Path(shutil.copytree(ground.base / "configs", ground.folder / "open" / "configs"))


def _yaml(file: Path, content: Any, rng: random.Random) -> None:
    try:
        words = yaml.safe_dump(content, allow_unicode=rng.random() < 0.5, sort_keys=False)
    except (yaml.YAMLError, ValueError):
        words = "{}"
    file.write_bytes(words.encode(errors="surrogateescape"))


KINDS: dict[str, tuple[Draw, float, float]] = {  # its weight, and the share that is accepted, rather too small
    "overrides": (overrides, 3, 0.05),
    "cluster values": (cluster_values, 2, 0.2),
    "config files": (config_files, 2, 0.1),
    "personal clusters.yaml": (personal, 1, 0.1),
    "environment": (environment, 2, 0.1),
    "names of runs and hosts": (folders.names, 1.5, 0.3),
    "run directories": (folders.run_directories, 5, 0.3),
    "checkpoints": (folders.checkpoints, 2, 0.1),
    "forged attributes": (folders.forged_attributes, 2, 0.3),
    "searches": (folders.searches, 1.5, 0.2),
    "events files": (folders.events, 1, 0.5),
    "monitor files": (folders.samples, 1, 0.5),
    "data files": (folders.data_files, 1.5, 0.1),
    "training": (training.training, 1.5, 0.2),
    "words of tools": (words_of_tools, 1.5, 0.0),
    "cookiecutter answers": (answers, 0.7, 0.1),
}
