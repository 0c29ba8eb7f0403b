"""Check that each process finds its rank under every launcher, and that a launch must match the config."""

import os

import pytest
from omegaconf import DictConfig, OmegaConf

from hpc.config import errors
from hpc.config.errors import ConfigError
from hpc.launch import node_checks, placement, rendezvous
from hpc.launch.placement import Placement

# Slurm's variables of a job, and those of a step: task 6 of 2 nodes x 4 tasks.
JOB = {"SLURM_JOB_ID": "17", "SLURM_NNODES": "2", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}
JOB |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n[07-09]"}
STEP = {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
STEP |= {"SLURM_STEP_NODELIST": "n[08-09]", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
PALS = {"PALS_RANKID": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PMI_RANK": "5"}
TMRSH = {"HPC_RANK": "5", "HPC_WORLD_SIZE": "8", "HPC_LOCAL_RANK": "1", "HPC_LOCAL_WORLD_SIZE": "4"}
SRUN = Placement("srun", 5, 8, 1, 4, "n08", "3")
ALONE = Placement("none", 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (JOB | STEP, SRUN),
        (JOB | STEP | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, SRUN),  # leaked
        (JOB | STEP | {"PMI_RANK": "5", "PMI_SIZE": "8"}, SRUN),  # srun --mpi=pmi2
        (TORCHRUN | {"MASTER_ADDR": "n08"}, Placement("torchrun", 5, 8, 1, 4, "n08")),
        (JOB | STEP | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"} | TORCHRUN, Placement("torchrun", 5, 8, 1, 4)),
        (OPEN_MPI, Placement("mpiexec (Open MPI)", 5, 8, 1, 4)),
        (MPICH, Placement("mpiexec (MPICH)", 5, 8, 1, 4)),
        (PALS, Placement("mpiexec (PALS)", 5, 8, 1, 4)),
        (TMRSH | {"MASTER_ADDR": "n08"}, Placement("pbs_tmrsh", 5, 8, 1, 4, "n08")),
        (JOB, ALONE),  # the batch shell has a SLURM_PROCID, too
        ({}, ALONE),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ALONE),
        ({"LOCAL_RANK": "1", "NODE_RANK": "0"}, Placement("none", 1, 1, 0, 1)),  # Lightning's child prints nothing
    ],
    ids="srun leaked pmi2 torchrun srun-torchrun openmpi mpich pals tmrsh batch nothing one child".split(),  # noqa: SIM905
)
def test_the_launcher_tells_a_process_its_place(environ: dict, place: Placement) -> None:
    assert placement.read_placement(environ) == place
    assert place.launcher == "none" or place.node_rank == 1


@pytest.mark.parametrize(("tasks", "per_node"), [("2(x2),1", 0), ("2,1", 0), ("16(x128)", 16), ("1", 1), ("", 0)])
def test_tasks_per_node_are_one_number_or_none(tasks: str, per_node: int) -> None:
    assert placement.read_placement(JOB | STEP | {"SLURM_STEP_TASKS_PER_NODE": tasks}).local_world_size == per_node


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n[07-09,12],login", "n07"), ("a1", "a1"), ("a1,a2", "a1"), ("n[1-2]-ib", "n1-ib"), ("x[3,5-7]y[1-2]", "x3y1"),
        ("jwb[0001,0003]", "jwb0001"), ("nid[005000-005003].hsn,login", "nid005000.hsn"), ("b-2,n[1-2]", "b-2"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert placement.first_host(nodes) == first


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({"SLURM_JOB_ID": "17"}, "17"), ({"PBS_JOBID": "17.server"}, "17"), ({}, ""),
        ({"SLURM_JOB_ID": "18", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "1"}, "17_1"),
    ],
)  # fmt: skip
def test_the_number_of_the_job(environ: dict, number: str) -> None:
    assert placement.job_id(environ) == number and placement.is_in_job(environ) is bool(number)


# -- Where ranks meet --


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network in which the first node's name also resolves to a loopback address, as on Debian."""
    known = {"n08": {"10.0.0.8", "127.0.1.1"}, "n08i": {"10.1.0.8"}, "10.1.0.8": {"10.1.0.8"}, "n09": {"10.0.0.9"}}
    known |= {"localhost": {"127.0.0.1"}, "127.0.1.1": {"127.0.1.1"}}
    monkeypatch.setattr(placement, "_ip_addresses", lambda host: known.get(host, set()))


def settled(place: Placement, suffix: str = "", **environ: str) -> dict[str, str]:
    placement.export_rank_variables(place, environ, host_suffix=suffix)
    return environ


def test_ranks_are_given_what_torch_asks_for(names: None) -> None:
    given = settled(SRUN, "i", RANK="1", SLURM_JOB_ID="17")
    expected = {"MASTER_ADDR": "n08i", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert given == expected | {"NODE_RANK": "1", "GROUP_RANK": "1", "SLURM_JOB_ID": "17"}


@pytest.mark.parametrize(("asked", "address"), [("n08", "n08i"), ("n08i", "n08i"), ("10.1.0.8", "10.1.0.8")])
def test_an_address_of_the_first_node_is_accepted(asked: str, address: str, names: None) -> None:
    assert settled(SRUN, "i", MASTER_ADDR=asked)["MASTER_ADDR"] == address


@pytest.mark.parametrize("asked", ["n09", "localhost", "127.0.1.1", "unheard.of"])
def test_an_address_that_leads_elsewhere_is_rejected(asked: str, names: None) -> None:
    with pytest.raises(ConfigError) as caught:
        settled(SRUN, "i", MASTER_ADDR=asked)
    assert caught.value.key == "MASTER_ADDR" and "n08" in caught.value.rule and "unset MASTER_ADDR" in caught.value.fix


def test_mpiexec_has_to_be_told_the_first_node_if_there_are_several() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        settled(placement.read_placement(MPICH))
    assert settled(placement.read_placement(MPICH | {"MASTER_ADDR": "n08"}), MASTER_ADDR="n08")["MASTER_ADDR"] == "n08"
    assert settled(Placement("mpiexec (MPICH)", 1, 4, 1, 4))["MASTER_ADDR"] == "127.0.0.1"  # one node


def test_torchrun_has_settled_where_its_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "die_with_parent", lambda: None)  # the parent is pytest
    given = settled(placement.read_placement(TORCHRUN), MASTER_ADDR="anything", MASTER_PORT="1")
    assert (given["MASTER_ADDR"], given["MASTER_PORT"], given["RANK"]) == ("anything", "1", "5")


def test_the_network_interface_of_an_address() -> None:
    assert rendezvous.own_address("127.0.0.1") == "127.0.0.1" and rendezvous.own_address("no such host") == ""
    assert rendezvous.find_interface("127.0.0.1") == "lo" and rendezvous.find_interface("192.0.2.1") is None


def test_missing_ranks_are_listed_shortly() -> None:
    assert rendezvous._format_ranges([1, 2, 3, 7]) == "1-3, 7" and rendezvous._format_ranges([4]) == "4"


# -- Invalid launches --


def cfg(nodes: int = 2, devices: int = 4, accelerator: str = "gpu", scheduler: str | None = "slurm") -> DictConfig:
    cluster = {"name": "here", "scheduler": scheduler, "accelerator": "gpu"}
    trainer = {"num_nodes": nodes, "devices": devices, "accelerator": accelerator}
    return OmegaConf.create({"trainer": trainer, "cluster": cluster})


ON_NODE = {"SLURMD_NODENAME": "n1"}  # set by slurmd


def placed(cfg: DictConfig, environ: dict[str, str]) -> None:
    node_checks.check_launch(cfg, placement.read_placement(environ), environ=environ)


@pytest.mark.parametrize(
    ("config_", "environ"),
    [
        (cfg(), JOB | STEP),
        (cfg(), TORCHRUN),
        (cfg(), JOB | STEP | TORCHRUN),
        (cfg(), MPICH),
        (cfg(nodes=1, devices=1), JOB | ON_NODE),  # a job in which Lightning starts the other ranks of the node
        (cfg(nodes=1, devices=4), JOB | ON_NODE),
        (cfg(nodes=1, devices=1), {"PBS_JOBID": "1"}),
        (cfg(nodes=1, scheduler=None), {}),
        (cfg(nodes=1, accelerator="cpu"), {}),  # trying things on a login node
        (cfg(), {"LOCAL_RANK": "1", "NODE_RANK": "1"}),
    ],
)
def test_the_launch_that_the_config_asks_for_is_accepted(config_: DictConfig, environ: dict) -> None:
    placed(config_, environ)


TWO_TASKS = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": "1"}
LAUNCH = "srun --nodes=2 --ntasks-per-node=4 python train.py ..."


@pytest.mark.parametrize(
    ("config_", "environ", "rule", "fix"),
    [
        (cfg(), JOB, "alone", LAUNCH),  # no srun
        (cfg(), {"PBS_JOBID": "1"}, "alone", "submit.py ..., or on each node torchrun --nnodes=2 --nproc-per-node=4 "),
        (cfg(), {}, "alone", "python submit.py ..., or trainer.num_nodes=1"),
        (cfg(nodes=1, devices=1), JOB | STEP | TWO_TASKS, "srun started 2", "--nodes=1 --ntasks-per-node=1 "),
        (cfg(nodes=1, devices=2), JOB | STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
         "srun started 1", "--nodes=1 --ntasks-per-node=2 "),
        (cfg(nodes=4, devices=2), JOB | STEP, "8 in all, 4 on a node", "--nodes=4 --ntasks-per-node=2 "),
        (cfg(nodes=4), JOB | STEP, "srun started 8", "--nodes=4"),
        (cfg(), JOB | STEP | {"SLURM_STEP_TASKS_PER_NODE": "5,3"}, "not equally many", LAUNCH),
        (cfg(), JOB | STEP | {"SLURM_HET_SIZE": "2"}, "heterogeneous", "one part"),
        (cfg(), JOB | {"SLURM_HET_SIZE": "2"}, "heterogeneous", "one part"),
        (cfg(), JOB | STEP | TORCHRUN | {"SLURM_NODEID": "0"}, "in the step (0)", "$SLURM_NODEID"),
        (cfg(nodes=1), {}, "a login node?", "python submit.py"),
        (cfg(nodes=1), JOB, "on none of them", "srun --nodes=1"),  # the shell that salloc gives
    ],
)  # fmt: skip
def test_a_launch_that_is_not_the_configs_is_rejected(config_: DictConfig, environ: dict, rule: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        placed(config_, environ)
    assert rule in caught.value.rule and fix in caught.value.fix


def test_of_ranks_that_all_know_one_speaks(capfd: pytest.CaptureFixture[str]) -> None:
    for rank in range(8):
        step = JOB | STEP | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 4)}
        for environ in (step, step | TORCHRUN | {"RANK": str(rank)}):
            with (
                pytest.raises(SystemExit) as left,
                errors.exit_on_config_error(placement.is_reporting_rank(placement.read_placement(environ), environ)),
            ):
                placed(cfg(nodes=1), environ)
            assert left.value.code == 2
    assert capfd.readouterr().err.count("ConfigError: ") == 2


def test_what_one_rank_alone_knows_it_says() -> None:
    with pytest.raises(ConfigError) as caught:
        placed(cfg(), JOB | STEP | TORCHRUN | {"SLURM_NODEID": "0", "LOCAL_RANK": "0", "RANK": "4"})
    assert caught.value.only_this_rank


# -- Nodes that do not match the config --

ALIKE = [{"host": f"n{n}", "rejected": None, "config": "c", "code": "k", "versions": "v"} for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("what", "fix"), [("config", "freezes"), ("code", "one snapshot"), ("versions", "export VENV")]
)  # fmt: skip
def test_nodes_that_differ_are_rejected(what: str, fix: str) -> None:
    node_checks.check_agreement(ALIKE)
    with pytest.raises(ConfigError) as caught:
        node_checks.check_agreement([*ALIKE[:2], ALIKE[2] | {what: "other"}])
    assert (
        caught.value.rule == f"must be the same on all ranks, but it differs: {ALIKE[0][what]} on n1, n2; other on n3"
    )
    assert fix in caught.value.fix


def test_the_complaint_of_one_node_is_everybodys() -> None:
    rejected = ["ckpt", "/x", "must be an existing file", "another"]
    with pytest.raises(ConfigError, match=r"^ckpt must be an existing file \(on n2\); got /x.\n  Try: another$"):
        node_checks.check_agreement([ALIKE[0], ALIKE[1] | {"rejected": rejected}])


def test_the_end_of_a_job_is_a_time_or_rejected() -> None:
    assert [
        placement.job_end_unix_time(environ) for environ in ({}, {"HPC_JOB_END": "0"}, {"HPC_JOB_END": "17e8"})
    ] == [
        None,
        None,
        17e8,
    ]
    for told in ("abc", "nan", "inf", "1 2"):
        with pytest.raises(ConfigError, match="must be a unix time"):
            placement.job_end_unix_time({"HPC_JOB_END": told})


def test_a_run_that_shares_its_node_must_not_see_the_gpus_of_the_others() -> None:
    known = cfg(nodes=1, devices=1)
    known.cluster.update({"request": "--gres=gpu:{gpus}", "cores_per_gpu": None})
    for visible, runs in (("2", "4"), ("0,1,2,3", None)):
        environ = {"CUDA_VISIBLE_DEVICES": visible} | ({"HPC_RUNS_PER_NODE": runs} if runs else {})
        node_checks._check_resources(known, SRUN, environ=environ)
    with pytest.raises(ConfigError, match=r"sees 4 GPUs(?s:.*)cluster\.whole_nodes=false"):
        environ = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "HPC_RUNS_PER_NODE": "4"}
        node_checks._check_resources(known, SRUN, environ=environ)


def test_too_few_gpus_and_cores_are_told_before_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    known = cfg()
    known.cluster.update({"request": "--gres=gpu:{gpus}", "cores_per_gpu": 64})
    for visible, fix in {"0": "trainer.devices=1", "": "trainer=cpu"}.items():
        with pytest.raises(ConfigError) as caught:
            node_checks._check_resources(known, SRUN, environ={"CUDA_VISIBLE_DEVICES": visible})
        assert caught.value.key == "trainer.devices" and fix in caught.value.fix
    with pytest.raises(ConfigError) as caught:
        node_checks._check_resources(known, SRUN, environ={"CUDA_VISIBLE_DEVICES": "0", "PBS_JOBID": "17.server"})
    assert "select" in caught.value.fix and "--g" not in caught.value.rule + caught.value.fix, "Slurm's options"
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    with pytest.raises(ConfigError, match="--cpus-per-task=64"):
        node_checks._check_resources(known, SRUN, environ={"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
