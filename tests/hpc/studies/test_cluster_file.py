"""Check tools/cluster.py as a user types it, with stand-ins for schedulers that print what was recorded."""

import sys
from pathlib import Path

import pytest
from desk import STUB, Desk
from test_limits import ASSOCIATIONS, NODES, PARTITIONS

from hpc.config import errors, project
from hpc.config.errors import ConfigError
from hpc.jobs import job_states, slurm_inventory
from hpc.jobs.inventory import Inventory
from hpc.programs import cluster
from hpc.studies import cluster_choices, cluster_facts, cluster_file, node_probe
from hpc.studies.cluster_choices import Choice
from hpc.studies.cluster_facts import Fact

CONFIGS = project.CONFIGS
PBS_SYSTEMS = Path(__file__).parents[1] / "jobs" / "pbs_systems"
INVENTORY = Inventory(
    slurm_inventory.parse_partitions(PARTITIONS),
    slurm_inventory.parse_nodes(NODES),
    slurm_inventory.parse_associations(ASSOCIATIONS),
)


class Login:
    """A login node on which tools/cluster.py is typed."""

    def __init__(self, desk: Desk, configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.desk, self.folder, self.set = desk, configs / "cluster", monkeypatch
        self.folder.mkdir(parents=True)
        monkeypatch.setattr(project, "CONFIGS", configs)
        monkeypatch.delenv("LOADEDMODULES", raising=False)
        for name in ("sbatch", "qsub"):
            (desk.bin / name).unlink(missing_ok=True)

    def slurm(self) -> None:
        self.desk.command("sbatch", "exit 1")
        self.desk.command("scontrol", f"[[ $* != *partition ]] || cat <<'END'\n{PARTITIONS}END")
        self.desk.command("sinfo", f"cat <<'END'\n{NODES}END")
        self.desk.command("sacctmgr", f"[[ $* != *associations* ]] || cat <<'END'\n{ASSOCIATIONS}END")

    def pbs(self, system: str) -> None:
        self.desk.command("qsub", f"{STUB}echo 17.server")
        files = {part: PBS_SYSTEMS / f"{system}-{part}.txt" for part in ("queues", "server", "nodes")}
        self.desk.command("qstat", f"case $1 in -Q) cat '{files['queues']}' ;; -B) cat '{files['server']}' ;; esac")
        self.desk.command("pbsnodes", f"cat '{files['nodes']}'")

    def type(self, *words: str) -> int:
        """Run `python tools/cluster.py ...` and return its exit code."""
        self.set.setattr(sys, "argv", ["tools/cluster.py", *words])
        code = 2
        try:
            with errors.exit_on_config_error():
                code = cluster.main()
        except SystemExit as end:
            code = int(end.code or 0)
        self.out, self.err = self.desk.capfd.readouterr()
        return code

    def file(self, name: str = "mine.yaml") -> str:
        return (self.folder / name).read_text()


@pytest.fixture
def login(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Login:
    return Login(desk, tmp_path / "other configs", monkeypatch)


def keys(text: str) -> dict[str, str]:
    """Return the lines of a file by their keys, without comments."""
    lines = [line.partition(" #")[0] for line in text.splitlines() if not line.startswith("#")]
    return {key: value.strip() for key, _, value in (line.partition(": ") for line in lines)}


def test_the_file_of_a_slurm_cluster(login: Login) -> None:
    login.slurm()
    assert login.type("mine") == 0, login.err
    made = keys(login.file())
    assert (made["name"], made["scheduler"], made["gpus_per_node"]) == ("mine", "slurm", "4")
    assert (made["cores_per_gpu"], made["request"], made["memory_gb"]) == ("4", '"--gres=gpu:a100:{gpus}"', "62")
    assert made["gpu"] == made["network_gbs"] == "null"
    assert "partition" not in made, "the default partition need not be named"
    assert "unknown, one of A100, " in login.file() and "gpu: unknown, one of A100, " in login.out
    assert "your accounts: other, science" in login.out
    assert login.out.endswith("next: python submit.py trainer=ddp_4node cluster=mine\n")
    assert not (login.folder / "mine.sh").exists()


def test_other_nodes_are_listed_and_can_be_chosen(login: Login) -> None:
    login.slurm()
    partitions = PARTITIONS.replace("DOWN", "UP")
    login.desk.command("scontrol", f"[[ $* != *partition ]] || cat <<'END'\n{partitions}END")
    assert login.type("mine") == 0
    assert "#   gpu: 2 nodes with 8 a100, at most 24:00:00, at most 4 nodes of a job\n" in login.file()
    assert "#   old: 2 nodes with 2 GPUs, at most 02:00:00\n" in login.file()
    assert login.type("theirs", "--partition", "old") == 0
    made = keys(login.file("theirs.yaml"))
    assert (made["partition"], made["gpus_per_node"], made["request"]) == ("old", "2", '"--gres=gpu:{gpus}"')
    assert (made["memory_gb"], made["whole_nodes"]) == ("0", "true")


def test_loaded_modules_are_those_of_jobs(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    login.slurm()
    monkeypatch.setenv("LOADEDMODULES", "gcc/12:a b$(rm -r x)")
    assert login.type("mine") == 0
    assert login.file("mine.sh").splitlines()[1:] == [
        "module load gcc/12 || return",
        "module load 'a b$(rm -r x)' || return",
    ]


def test_what_differs_from_a_file(login: Login) -> None:
    login.slurm()
    assert login.type("mine") == 0
    assert login.type("mine", "--compare") == 0 and "has no differences" in login.out
    text = login.file().replace("cores_per_gpu: 4", "cores_per_gpu: 7").replace("gres=gpu:a100", "gpus-per-node=h100")
    (login.folder / "mine.yaml").write_text(text.replace("memory_gb: 62 ", "partition: gone\nmemory_gb: 62 "))
    assert login.type("mine", "--compare") == 1
    first, *others = login.out.splitlines()
    assert first == "partition: the file has gone, which is no partition with GPUs here; compared with another one:"
    assert others == [
        "cores_per_gpu: the file has 7; 4 by sinfo: 16 CPUs of a node, 2 hardware threads of a core",
        'request: the file has "--gpus-per-node=h100:{gpus}"; "--gres=gpu:a100:{gpus}" by sinfo: gpu:a100:4',
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["../mine"], "NAME must be a name of lower-case letters, digits and underscores; got '../mine'."),
        (["mine", "--partition", "cpu"], "--partition must be one of those with GPUs: gpu; got cpu."),
        (["mine", "--gpu", "h100"], "--gpu must be one of the types that partition gpu has: a100; got h100."),
        (["mine", "--compare"], "mine.yaml must exist to be compared."),
        (["taken"], "taken.yaml must not exist: it would be replaced."),
        (["broken", "--compare"], "broken.yaml cannot be read: "),
    ],
)
def test_bad_words(login: Login, words: list[str], sentence: str) -> None:
    login.slurm()
    (login.folder / "taken.yaml").write_text("name: taken\n")
    (login.folder / "broken.yaml").write_text("name: [\n")
    before = sorted(login.folder.iterdir())
    assert login.type(*words) == 2
    assert sentence in login.err and sorted(login.folder.iterdir()) == before


@pytest.mark.parametrize("answer", ["exec sleep 60", "exit 1", "echo 'gpu up 8 idle'"])
def test_a_slurm_that_tells_nothing(login: Login, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_states, "TIMEOUT_SECONDS", 1)
    login.slurm()
    login.desk.command("sinfo", answer)
    assert login.type("mine") == 2
    assert "sinfo gave no usable answer about partitions and nodes" in login.err
    assert not list(login.folder.iterdir())


def test_a_wrapper_of_the_other_scheduler_is_not_the_scheduler(login: Login) -> None:
    login.pbs("whole_nodes")
    login.desk.command("sbatch", "exit 1")
    for name in ("sinfo", "scontrol"):
        login.desk.command(name, "exit 1")
    assert login.type("mine") == 0, login.err
    assert keys(login.file())["scheduler"] == "pbs"


def test_a_machine_without_a_scheduler(login: Login) -> None:
    assert login.type("mine") == 2
    assert "sbatch or qsub must be on this machine's PATH" in login.err


def test_a_cluster_without_gpus(login: Login) -> None:
    login.slurm()
    login.desk.command("sinfo", "echo 'gpu*|8|16|2:4:2|64000|(null)|ib|g[1-8]'")
    assert login.type("mine") == 2
    assert "must have a partition that is up and whose nodes have GPUs" in login.err


@pytest.mark.parametrize(
    ("system", "words", "expected"),
    [
        ("whole_nodes", [], {"whole_nodes": "true", "memory_gb": "null"}),  # the default queue, which passes jobs on
        ("whole_nodes", ["--queue", "debug"], {"partition": "debug"}),
        ("shared_nodes", [], {"partition": "workq", "memory_gb": "512"}),
        ("shared_nodes", ["--queue", "gpu"], {"partition": "gpu", "memory_gb": "512"}),
    ],
)
def test_the_file_of_a_pbs_cluster(login: Login, system: str, words: list[str], expected: dict[str, str]) -> None:
    login.pbs(system)
    assert login.type("mine", *words) == 0, login.err
    made = keys(login.file())
    assert made["scheduler"] == "pbs" and made["request"] == '"ncpus={cores}:ngpus={gpus}:mpiprocs=1"'
    assert (made["gpus_per_node"], made["cores_per_gpu"]) == ("4", "16")
    assert made["launcher"] == "pbs_tmrsh"  # the default of a cluster's file is srun
    assert expected.items() <= made.items(), login.file()
    num_nodes = 4 if not words and system == "whole_nodes" else 2
    typed = [f"cluster.{key}={value}" for key, value in made.items() if key not in ("defaults", "name", "scheduler")]
    login.set.setattr(project, "CONFIGS", CONFIGS)  # the keys of the new file are typed
    command = ["cluster=pbs", "trainer=ddp_4node", f"trainer.num_nodes={num_nodes}", *typed]
    assert login.desk.type(*command) == 0, login.desk.err
    assert f"#PBS -l select={num_nodes}:ncpus=64:ngpus=4:mpiprocs=1" in login.desk.noted("qsub.script")


# -- Facts --


def choice(partition: str = "gpu") -> Choice:
    return cluster_choices.choose(
        cluster_choices.list_choices(INVENTORY), partition=partition, gpu_type=None, word="partition"
    )


def fact(key: str, probed: node_probe.ProbedNode | None = None) -> Fact:
    facts = cluster_facts.list_facts(choice(), INVENTORY, scheduler="slurm", probed=probed)
    return next(fact for fact in facts if fact.key == key)


def test_a_job_tells_what_the_scheduler_does_not() -> None:
    node = node_probe.ProbedNode("NVIDIA A100-SXM4-80GB", 50.0, "ib0", "x86_64")
    assert fact("gpu", node).value == "A100-SXM4-80GB"
    assert (fact("network_gbs", node).value, fact("interface", node).value) == (50.0, "ib0")
    unknown = fact("gpu", node_probe.ProbedNode("NVIDIA Z9"))
    assert unknown.value is None and "NVIDIA Z9, which hpc/jobs/hardware.yaml does not have" in unknown.source


def test_what_a_job_prints() -> None:
    output = """\
machine aarch64
gpu NVIDIA GH200 120GB
adapter 200 Gb/sec (4X HDR)
adapter 200 Gb/sec (4X HDR)
megabits 200000
megabits -1
interface lo UNKNOWN 127.0.0.1/8
interface hsn1 UP 10.0.0.2/16
interface hsn0@eth UP 10.0.0.1/16
interface eth0 UP 192.168.0.1/24
a line that a module has printed
"""
    assert node_probe.parse(output) == node_probe.ProbedNode("NVIDIA GH200 120GB", 75.0, "hsn0", "aarch64")
    assert node_probe.parse("") == node_probe.ProbedNode()


def test_what_a_site_keeps_of_a_node_is_left_out() -> None:
    node = {"CPUEfctv": "14", "MemSpecLimit": "2000"}
    assert cluster_choices.subtract_reserved(choice(), node).nodes.cpus == 14
    assert cluster_choices.subtract_reserved(choice(), node).nodes.memory_mb == 62000
    assert cluster_choices.subtract_reserved(choice(), {"CoreSpecCount": "2"}).nodes.cpus == 12  # cores of two threads
    assert cluster_choices.subtract_reserved(choice(), {}) == choice()


def test_of_two_kinds_in_one_partition_a_feature_tells_them_apart() -> None:
    nodes = "q*|8|16|2:4:1|64000|gpu:4|a100,ib|g[1-8]\nq*|4|16|2:4:1|64000|gpu:4|v100,ib|v[1-4]\n"
    partitions = slurm_inventory.parse_partitions(PARTITIONS.replace("=gpu", "=q").splitlines()[0])
    inventory = Inventory(partitions, slurm_inventory.parse_nodes(nodes))
    best = cluster_choices.list_choices(inventory)[0]
    facts = {fact.key: fact.value for fact in cluster_facts.list_facts(best, inventory, scheduler="slurm", probed=None)}
    assert facts["constraint"] == "a100"


def slurm_choices(partitions: str, nodes: str) -> list[Choice]:
    both = slurm_inventory.parse_partitions(partitions), slurm_inventory.parse_nodes(nodes)
    return cluster_choices.list_choices(Inventory(*both))


def test_what_the_user_may_not_name_or_loses_or_is_a_slice_comes_last() -> None:
    line, nodes = PARTITIONS.splitlines()[0], "{}|9|8|1:8:1|1|gpu:{}|x|{}1\n"
    partitions = "".join(
        line.replace("=gpu ", f"={name} ").replace("Default=YES", f"Default=NO {more}") + "\n"
        for name, more in {
            "maint": "Hidden=YES",
            "owner": "AllowGroups=no-such-group",
            "scavenge": "PreemptMode=REQUEUE",
            "mig": "",
            "gpu": "",
        }.items()
    ).replace("AllowGroups=ALL ", "")
    sizes = {"maint": "8", "owner": "8", "scavenge": "8", "mig": "a100_1g.5gb:56", "gpu": "4"}
    choices = slurm_choices(partitions, "".join(nodes.format(name, gpus, name) for name, gpus in sizes.items()))
    assert choices[0].partition.name == "gpu"
    assert {choice.partition.name for choice in choices[-2:]} == {"maint", "owner"}


def test_nodes_that_differ_by_some_memory_or_a_rack_are_one_kind() -> None:
    nodes = "".join(f"gpu*|1|8|1:8:1|{1000 + number}|gpu:4|rack{number},v100|g{number}\n" for number in range(1, 6))
    (choice,) = slurm_choices(PARTITIONS, nodes)
    assert (choice.nodes.num_nodes, choice.nodes.memory_mb, choice.nodes.features) == (5, 1001, {"v100"})


@pytest.mark.parametrize(
    ("qos_of_partition", "qos_of_user", "facts"),
    [
        ("train", "normal,train", {"qos": "train", "time": "00:20:00"}),
        ("train,long", "normal,train,long", {"qos": None}),
        ("normal,train", "normal,train", {"time": "00:10:00"}),  # the default one may be used
        ("ALL", "normal,train", {"time": "00:10:00"}),
    ],
)
def test_the_qos_that_a_job_must_name_and_its_longest_time(
    qos_of_partition: str, qos_of_user: str, facts: dict[str, str | None]
) -> None:
    inventory = Inventory(
        slurm_inventory.parse_partitions(PARTITIONS.replace("AllowQos=ALL", f"AllowQos={qos_of_partition}")),
        slurm_inventory.parse_nodes(NODES),
        slurm_inventory.parse_associations(f"test|science||normal|{qos_of_user}|||\n"),
        slurm_inventory.parse_qos("normal||00:10:00|||\ntrain||00:20:00|||\nlong|||||\n"),
    )
    best = cluster_choices.list_choices(inventory)[0]
    listed = cluster_facts.list_facts(best, inventory, scheduler="slurm", probed=None)
    assert {fact.key: fact.value for fact in listed if fact.key in ("qos", "time")} == facts


def test_the_default_partition_comes_first_if_it_has_a_few_nodes() -> None:
    partitions = slurm_inventory.parse_partitions(PARTITIONS)
    few, many = "gpu*|{}|8|1:8:1|1|gpu:1|x|g1\n", "cpu|90|8|1:8:1|1|gpu:8|x|c1\n"
    for number, first in ((3, "cpu"), (4, "gpu")):
        inventory = Inventory(partitions, slurm_inventory.parse_nodes(few.format(number) + many))
        assert cluster_choices.list_choices(inventory)[0].partition.name == first


def test_a_file_holds_text_as_yaml_reads_it() -> None:
    facts = [
        Fact("time", "1:00:00", "a"),
        Fact("qos", "null", "b"),
        Fact("gpu", None, "c"),
        Fact("whole_nodes", True, "d"),
    ]
    text = cluster_file.render("mine", facts, title=["by tools/cluster.py"])
    assert (
        'time: "1:00:00" ' in text and 'qos: "null" ' in text and "gpu: null " in text and "whole_nodes: true " in text
    )


def test_a_choice_must_exist() -> None:
    with pytest.raises(ConfigError, match="must have a queue that is up"):
        cluster_choices.choose([], partition=None, gpu_type=None, word="queue")
