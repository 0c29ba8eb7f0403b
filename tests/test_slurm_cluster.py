"""Test three commands on a Slurm that nothing of the project knows: it is asked, and a job of four nodes trains."""

from dataclasses import dataclass, field

import pytest
import slurm_accounts
import slurm_nodes
from slurm_project import QUIET, Desk, made_for_tests

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(slurm_nodes.missing() is not None, reason=f"{slurm_nodes.missing()}"),
    pytest.mark.skipif(slurm_accounts.missing() is not None, reason=f"{slurm_accounts.missing()}"),
]
NODE = "NodeName={{name}} NodeAddr={{address}} RealMemory={{memory}} CPUs=8 Boards=1 SocketsPerBoard=1 {}\n"
CORES, THREADS = "CoresPerSocket=8 ThreadsPerCore=1", "CoresPerSocket=4 ThreadsPerCore=2"
# Of one job, as sites do it: what is not asked for is little.
DEFAULT = "PartitionName=DEFAULT DefMemPerCPU=100 State=UP\n"


@dataclass(frozen=True)
class Shape:
    """A Slurm, and lines that the file of this cluster must have."""

    node: str
    partitions: str
    expected: list[str]
    gpu_type: str = ""
    accounts: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)


SHAPES = {
    "typed GRES": Shape(
        f"{CORES} Gres=gpu:h100:4",
        "PartitionName=gpu Nodes=n[1-4] Default=YES MaxTime=1-00:00:00\n",
        ["gpus_per_node: 4", 'request: "--gres=gpu:h100:{gpus}"', "cores_per_gpu: 2", "memory_gb: 15"],
        gpu_type="h100",
    ),
    "untyped GRES": Shape(
        f"{CORES} Gres=gpu:2 Feature=a40,ib",
        "PartitionName=all Nodes=n[1-4] Default=YES MaxTime=UNLIMITED\n",
        ["gpus_per_node: 2", 'request: "--gres=gpu:{gpus}"', "gpu: A40", "cores_per_gpu: 4"],
    ),
    "QoS": Shape(
        f"{CORES} Gres=gpu:1",
        "PartitionName=gpu Nodes=n[1-4] Default=YES MaxTime=1-00:00:00 AllowQos=train\n",
        ["qos: train", 'time: "00:20:00"'],
        accounts=[
            "add account science",
            "add user root account=science",
            "add qos train",
            "modify qos train set MaxWall=00:20:00 MaxTRESPerJob=node=4",
            "modify user root set qos=normal,train",
        ],
    ),
    "partitions": Shape(
        f"{CORES} Gres=gpu:1",
        "PartitionName=debug Nodes=n1 Default=YES MaxTime=0:10:00 MaxNodes=1\n"
        "PartitionName=whole Nodes=n[1-4] OverSubscribe=EXCLUSIVE MaxTime=2-00:00:00\n"
        "PartitionName=broken Nodes=n[1-4] State=DOWN\n",
        ["partition: whole", "memory_gb: 0", "whole_nodes: true"],
    ),
    "hardware threads": Shape(
        f"{THREADS} Gres=gpu:2",
        "PartitionName=gpu Nodes=n[1-4] Default=YES MaxTime=1-00:00:00\n",
        ["cores_per_gpu: 4", "2 hardware threads of a core"],
        options=["--job"],
    ),
}


@pytest.fixture(scope="module")
def project(bake):
    return made_for_tests(bake(cluster="local"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "QoS" else [pytest.mark.soak]) for name in SHAPES]
)
def test_a_four_node_job_trains_by_three_commands(name, project, tmp_path):
    shape = SHAPES[name]
    conf = {"node": NODE.format(shape.node), "partitions": DEFAULT + shape.partitions}
    (project / "configs/cluster/asked.yaml").unlink(missing_ok=True)
    with slurm_nodes.cluster(tmp_path, gpu_type=shape.gpu_type, accounts=shape.accounts, **conf) as slurm:
        desk = Desk(slurm, project)
        asked = desk.python("tools/cluster.py", "asked", *shape.options)
        assert asked.returncode == 0, asked.stdout + asked.stderr
        file = (project / "configs/cluster/asked.yaml").read_text()
        assert not [line for line in shape.expected if line not in file], file
        compared = desk.python("tools/cluster.py", "asked", "--compare")
        assert compared.returncode == 0, compared.stdout + compared.stderr
        # These nodes have no GPUs but in Slurm's books, so that the ranks compute on CPUs.
        words = ["trainer=ddp_4node", "cluster=asked", "cluster.accelerator=cpu", *QUIET, "trainer.max_epochs=1"]
        job, run_dir = desk.submit(*words, "data.global_batch_size=64")
        ended = desk.ended(job)
        assert (ended.state, ended.exit_code) == ("COMPLETED", 0), ended.log
        assert "outcome finished" in (run_dir / "verdict").read_text()
        assert ended.record["NumNodes"] == "4"
