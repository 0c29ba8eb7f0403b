"""Jobs that a Slurm can never start, and the first sentence of submit.py on each: for tests, and for `make bench`."""

CLUSTER = """\
defaults: [base]
name: asked
scheduler: slurm
gpus_per_node: 4
cores_per_gpu: 4
request: "--gres=gpu:{gpus}"
memory_gb: 60
"""
# Hardware threads, a typed GRES, two partitions, and a QoS with limits.
CONF = """\
NodeName=g[1-4] CPUs=16 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=2 RealMemory=64000 \
Gres=gpu:a100:4 Feature=a100,ib
PartitionName=gpu Nodes=g[1-4] Default=YES MaxTime=1-00:00:00 MaxNodes=4 State=UP
PartitionName=small Nodes=g[1-2] MaxTime=1:00:00 MaxNodes=2 State=UP AllowQos=normal
"""
ACCOUNTS = [
    "add account science",
    "add account other",
    "add user root account=science",
    "add qos debug",
    "modify qos debug set MaxWall=00:30:00 MaxTRESPerJob=node=2,gres/gpu=4",
    "modify user root set qos=normal,debug",
]
POSSIBLE = ["trainer=ddp_4node", "cluster.account=science"]
# What is impossible -> the words that are typed, and the first sentence of the answer.
IMPOSSIBLE = {
    "cores": (
        ["cluster.cores_per_gpu=8"],
        "cluster.cores_per_gpu must be at most 4, as 4 tasks share the 16 CPUs of a node in partition gpu; got 8.",
    ),
    "GPUs of a node": (
        ["trainer.devices=8", "cluster.gpus_per_node=8", "cluster.cores_per_gpu=1"],
        "trainer.devices must be at most 4, the number of GPUs of a node in partition gpu; got 8.",
    ),
    "type of GPU": (
        ["cluster.request=--gres=gpu:h100:4"],
        "cluster.request must name a type of GPU that nodes in partition gpu have: a100; got --gres=gpu:h100:4.",
    ),
    "memory": (
        ["cluster.memory_gb=100"],
        "cluster.memory_gb must be at most 62, the memory of a node in partition gpu in GiB; got 100.",
    ),
    "time": (
        ["cluster.time='2-00:00:00'"],
        "cluster.time must be at most 24:00:00, the longest time of a job in partition gpu; got 48:00:00.",
    ),
    "nodes": (
        ["trainer.num_nodes=8"],
        "trainer.num_nodes must be at most 4, the most nodes of a job in partition gpu; got 8.",
    ),
    "partition": (
        ["cluster.partition=smal"],
        "cluster.partition must be a partition of this cluster: gpu, small; got smal.",
    ),
    "nodes of a partition": (
        ["cluster.partition=small"],
        "trainer.num_nodes must be at most 2, the most nodes of a job in partition small; got 4.",
    ),
    "account": (
        ["cluster.account=other"],
        "cluster.account must be one that you may use on this cluster: root, science; got other.",
    ),
    "QoS": (
        ["cluster.qos=nope"],
        "cluster.qos must be one that you may use on this cluster: debug, normal; got nope.",
    ),
    "QoS of a partition": (
        ["cluster.partition=small", "cluster.qos=debug", "trainer.num_nodes=1", "cluster.time=0:10:00"],
        "cluster.qos must be one of those that may be used in partition small: normal; got debug.",
    ),
    "time of a QoS": (
        ["cluster.qos=debug", "trainer.num_nodes=1"],
        "cluster.time must be at most 00:30:00, the longest time of a job with qos debug; got 01:00:00.",
    ),
    "nodes of a QoS": (
        ["cluster.qos=debug", "cluster.time=0:10:00", "trainer.devices=1"],
        "trainer.num_nodes must be at most 2, the most nodes of a job with qos debug; got 4.",
    ),
    "GPUs of a QoS": (
        ["cluster.qos=debug", "cluster.time=0:10:00", "trainer.num_nodes=2"],
        "trainer.num_nodes x trainer.devices must be at most 4, the most GPUs of a job with qos debug; got 8.",
    ),
    "features": (
        ["cluster.constraint=h100"],
        "cluster.constraint must be features of nodes in partition gpu: a100, ib; got h100.",
    ),
    "licenses": (
        ["cluster.options=['--licenses=matlab:1']"],
        "sbatch: Slurm can never start this job, and says: Invalid license specification. Nothing is queued.",
    ),
}
