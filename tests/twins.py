"""Twins of the clusters that hpc ships: lines of slurm.conf for `sbatch --test-only`.

A twin has a few nodes and the partitions of a Slurm cluster. Names, CPUs, types of GPU and limits are the real ones, if
the cluster's file gives a source. Unknown memory is a round number. Accounts and QOS are not imitated, as Slurm accepts
any without a database. Submit plugins of the sites are not imitated either: `rejected` lists options that they are
known to reject. The PBS clusters have no twin.

    conf        NodeName and PartitionName lines
    rejected     options that a script for this cluster must not hold
    overrides   further overrides that a job needs there
"""

# Each of these would hide GPUs from a task, but Lightning must see all GPUs of its node.
REJECTED_EVERYWHERE = ["--gpus-per-task", "--ntasks-per-gpu", "--gpu-bind=closest", "--gpu-bind=single"]

ACCOUNT = ["cluster.account=abc"]
IMAGE = ["cluster.container='singularity run my.sif'"]
WHOLE = "OverSubscribe=EXCLUSIVE"  # nodes are never shared


def _nodes(sockets: int, cores: int, threads: int, memory_mb: int, gres: str | None = None, more: str = "") -> str:
    """Return the line of eight nodes with this number of cores per socket."""
    line = f"NodeName=n[1-8] Sockets={sockets} CoresPerSocket={cores} ThreadsPerCore={threads} RealMemory={memory_mb}"
    return " ".join([line, *([f"Gres={gres}"] if gres else []), *([more] if more else [])])


def _partition(name: str, *more: str, default: bool = True) -> str:
    return " ".join([f"PartitionName={name} Nodes=ALL State=UP Default={'YES' if default else 'NO'}", *more])


TWINS: dict[str, dict[str, list[str]]] = {
    "slurm": {
        "conf": [_nodes(1, 32, 1, 256000, "gpu:4"), _partition("main")],
        "rejected": [],
        "overrides": [],
    },
    "juwels_booster": {
        "conf": [
            _nodes(2, 24, 2, 500000, "gpu:4"),
            _partition("booster", "MaxTime=24:00:00", WHOLE),
            _partition("develbooster", "MaxTime=24:00:00", WHOLE, default=False),
        ],
        "rejected": [],
        "overrides": ACCOUNT,
    },
    "jureca_dc": {
        "conf": [
            _nodes(2, 64, 2, 500000, "gpu:4"),
            _partition("dc-cpu", "MaxTime=24:00:00", WHOLE),
            _partition("dc-gpu", "MaxTime=24:00:00", WHOLE, default=False),
        ],
        "rejected": [],
        "overrides": ACCOUNT,
    },
    "jupiter": {
        "conf": [_nodes(4, 72, 1, 480000, "gpu:4"), _partition("booster", WHOLE)],
        "rejected": [],
        "overrides": ACCOUNT,
    },
    "finisterrae3": {
        "conf": [_nodes(2, 32, 1, 256000, "gpu:a100:2"), _partition("main"), _partition("short", default=False)],
        "rejected": [],
        "overrides": [],
    },
    "massive_m3": {  # the nodes are made up: GPUs differ by partition
        "conf": [_nodes(2, 12, 1, 256000, "gpu:V100:2"), _partition("m3g")],
        "rejected": [],
        "overrides": [*ACCOUNT, "cluster.partition=m3g", "cluster.gpus_per_node=2", "cluster.cores_per_gpu=12"],
    },
    "perlmutter": {
        "conf": [
            _nodes(1, 64, 2, 256000, "gpu:a100:4", "Features=gpu,a100,hbm40g"),
            "NodeName=c[1-8] Sockets=2 CoresPerSocket=64 ThreadsPerCore=2 RealMemory=512000 Features=cpu",
            _partition("main", WHOLE),  # chosen by qos and constraint there
        ],
        "rejected": ["--partition"],
        "overrides": ACCOUNT,
    },
    "frontier": {  # without the 8 cores that are the system's: no job gets them
        "conf": [
            _nodes(1, 56, 1, 512000, "gpu:8", "Features=nvme"),
            _partition("batch", "MaxTime=2:00:00", "MaxNodes=91", WHOLE),
            _partition("extended", "MaxTime=24:00:00", "MaxNodes=64", WHOLE, default=False),
        ],
        "rejected": [],
        "overrides": ACCOUNT,
    },
    "lumi_g": {  # without the 8 cores that are the system's: no job gets them; 480 GiB
        "conf": [
            _nodes(1, 56, 1, 491520, "gpu:8"),
            _partition("standard-g", "MaxTime=2-00:00:00", "MaxNodes=1024", WHOLE),
            _partition("small-g", "MaxTime=3-00:00:00", "MaxNodes=4", default=False),
            _partition("dev-g", "MaxTime=3:00:00", "MaxNodes=32", default=False),
        ],
        "rejected": [],
        "overrides": [*ACCOUNT, *IMAGE],
    },
    "leonardo": {
        "conf": [
            _nodes(1, 32, 1, 494000, "gpu:a100:4"),
            _partition("boost_usr_prod", "MaxTime=24:00:00"),
            _partition("lrd_all_serial", "MaxTime=4:00:00", default=False),
        ],
        "rejected": [],
        "overrides": ACCOUNT,
    },
    "marenostrum5": {  # no memory is configured, so none can be asked for
        "conf": [_nodes(2, 40, 1, 1, "gpu:4"), _partition("acc", "MaxTime=3-00:00:00")],
        "rejected": ["--mem"],
        "overrides": [*ACCOUNT, "cluster.qos=acc_debug"],
    },
    "snellius": {
        "conf": [
            _nodes(2, 36, 1, 491520, "gpu:a100:4"),
            "NodeName=h[1-8] Sockets=2 CoresPerSocket=32 ThreadsPerCore=1 RealMemory=737280 Gres=gpu:h100:4",
            "PartitionName=gpu_a100 Nodes=n[1-8] MaxTime=5-00:00:00 State=UP",
            "PartitionName=gpu_h100 Nodes=h[1-8] MaxTime=5-00:00:00 State=UP",
        ],
        "rejected": [],
        "overrides": [],
    },
    "clariden": {
        "conf": [
            _nodes(4, 72, 1, 800000, "gpu:4"),
            _partition("normal", "MaxTime=12:00:00", WHOLE),
            _partition("debug", "MaxTime=1:30:00", "MaxNodes=4", WHOLE, default=False),
            _partition("low", "MaxTime=24:00:00", WHOLE, default=False),
        ],
        "rejected": [],
        "overrides": ACCOUNT,
    },
    "delta": {
        "conf": [
            _nodes(1, 64, 1, 240000, "gpu:4", "Features=scratch,projects,taiga"),
            _partition("gpuA100x4", "MaxTime=2-00:00:00", "DefaultTime=0:30:00", "DefMemPerCPU=1000"),
            _partition("gpuA100x4-interactive", "MaxTime=1:00:00", "MaxNodes=4", default=False),
        ],
        "rejected": [],
        "overrides": ACCOUNT,
    },
    "berzelius": {  # no partition is named there
        "conf": [_nodes(2, 64, 1, 1000000, "gpu:8", "Features=thin"), _partition("main")],
        "rejected": ["--partition"],
        "overrides": ACCOUNT,
    },
    "dardel": {
        "conf": [
            "NodeName=c[1-8] Sockets=2 CoresPerSocket=64 ThreadsPerCore=2 RealMemory=227328",
            _nodes(1, 64, 2, 456704, "gpu:8"),
            "PartitionName=main Nodes=c[1-8] MaxTime=24:00:00 State=UP OverSubscribe=EXCLUSIVE",
            "PartitionName=gpu Nodes=n[1-8] MaxTime=24:00:00 State=UP OverSubscribe=EXCLUSIVE",
        ],
        "rejected": [],
        "overrides": [*ACCOUNT, *IMAGE],
    },
    "vega": {
        "conf": [
            "NodeName=c[1-8] Sockets=2 CoresPerSocket=64 ThreadsPerCore=2 RealMemory=244140",
            _nodes(2, 64, 2, 488281, "gpu:4"),
            "PartitionName=cpu Nodes=c[1-8] State=UP Default=YES",
            "PartitionName=gpu Nodes=n[1-8] State=UP",
        ],
        "rejected": [],
        "overrides": [],
    },
    "karolina": {
        "conf": [
            _nodes(2, 64, 1, 1000000, "gpu:8"),
            _partition("qcpu"),
            _partition("qgpu", "MaxNodes=16", default=False),
            _partition("qgpu_exp", default=False),
        ],
        "rejected": [],
        "overrides": ACCOUNT,
    },
    "narval": {  # no partition is named there
        "conf": [_nodes(2, 24, 1, 509952, "gpu:a100:4"), _partition("main", "MaxTime=7-00:00:00")],
        "rejected": ["--partition"],
        "overrides": ACCOUNT,
    },
    "vista": {  # one GPU per node, of which Slurm knows nothing; no memory is configured, so none can be asked for
        "conf": [
            _nodes(1, 72, 1, 1),
            _partition("gh-dev", "MaxTime=2:00:00", "MaxNodes=8", WHOLE),
            _partition("gh", "MaxTime=48:00:00", "MaxNodes=64", WHOLE, default=False),
        ],
        "rejected": ["--gres", "--gpus", "--mem"],
        "overrides": [],
    },
    "fir": {  # no partition is named on the clusters of the Alliance
        "conf": [_nodes(1, 48, 1, 1152000, "gpu:h100:4"), _partition("main", "MaxTime=7-00:00:00")],
        "rejected": ["--partition"],
        "overrides": ACCOUNT,
    },
    "rorqual": {
        "conf": [_nodes(2, 32, 1, 510000, "gpu:h100:4"), _partition("main", "MaxTime=7-00:00:00")],
        "rejected": ["--partition"],
        "overrides": ACCOUNT,
    },
    "nibi": {
        "conf": [_nodes(2, 56, 1, 2048000, "gpu:h100:8"), _partition("main")],
        "rejected": ["--partition"],
        "overrides": ACCOUNT,
    },
    "trillium": {  # memory requests are ignored there
        "conf": [_nodes(1, 96, 1, 767000, "gpu:h100:4"), _partition("compute", "MaxTime=24:00:00", "MaxNodes=5")],
        "rejected": ["--partition", "--mem"],
        "overrides": ACCOUNT,
    },
    "tamia": {
        "conf": [_nodes(1, 48, 1, 512000, "gpu:h100:4"), _partition("main", "MaxTime=24:00:00")],
        "rejected": ["--partition"],
        "overrides": ACCOUNT,
    },
    "killarney": {
        "conf": [
            _nodes(2, 32, 1, 512000, "gpu:l40s:4"),
            "NodeName=h[1-8] Sockets=2 CoresPerSocket=24 ThreadsPerCore=1 RealMemory=2048000 Gres=gpu:h100:8",
            _partition("main"),
        ],
        "rejected": ["--partition"],
        "overrides": ACCOUNT,
    },
    "isambard_ai": {
        "conf": [_nodes(4, 72, 1, 480000, "gpu:4"), _partition("workq", "MaxTime=24:00:00")],
        "rejected": ["--partition"],
        "overrides": [],
    },
    "jean_zay": {  # the partition is chosen by the constraint there
        "conf": [_nodes(2, 48, 2, 500000, "gpu:4", "Features=h100"), _partition("gpu_p6")],
        "rejected": ["--partition"],
        "overrides": ACCOUNT,
    },
    "deltaai": {
        "conf": [
            _nodes(4, 72, 1, 860000, "gpu:4"),
            _partition("ghx4"),
            _partition("ghx4-interactive", default=False),
        ],
        "rejected": [],
        "overrides": ACCOUNT,
    },
    "arrhenius": {
        "conf": [
            "NodeName=c[1-8] Sockets=2 CoresPerSocket=128 ThreadsPerCore=1 RealMemory=750000",
            _nodes(4, 72, 1, 480000, "gpu:4"),
            "PartitionName=main Nodes=c[1-8] State=UP Default=YES",
            "PartitionName=gpu Nodes=n[1-8] State=UP",
        ],
        "rejected": ["--mem"],
        "overrides": ACCOUNT,
    },
    "roihu": {  # a job in gpumedium has at most four GPUs, which partitions cannot say
        "conf": [
            _nodes(4, 72, 1, 888832, "gpu:gh200:4"),
            _partition("gpumedium", "MaxTime=36:00:00", "MaxNodes=4"),
            _partition("gpularge", "MaxTime=36:00:00", "MaxNodes=10", default=False),
            _partition("gputest", "MaxTime=0:15:00", "MaxNodes=2", default=False),
        ],
        "rejected": ["--mem"],
        "overrides": [*ACCOUNT, "cluster.partition=gpularge"],
    },
    "olivia": {
        "conf": [
            "NodeName=c[1-8] Sockets=2 CoresPerSocket=128 ThreadsPerCore=1 RealMemory=758784",
            _nodes(4, 72, 1, 827392, "gpu:4"),
            "PartitionName=small Nodes=c[1-8] MaxTime=7-00:00:00 MaxNodes=1 State=UP Default=YES",
            "PartitionName=accel Nodes=n[1-8] MaxTime=7-00:00:00 State=UP",
        ],
        "rejected": [],
        "overrides": ACCOUNT,
    },
    "helma": {
        "conf": [
            _nodes(2, 64, 1, 768000, "gpu:h100:4"),
            "NodeName=h[1-8] Sockets=2 CoresPerSocket=64 ThreadsPerCore=1 RealMemory=768000 Gres=gpu:h200:4",
            "PartitionName=h100 Nodes=n[1-8] MaxTime=24:00:00 State=UP",
            "PartitionName=h200 Nodes=h[1-8] MaxTime=24:00:00 State=UP",
        ],
        "rejected": [],
        "overrides": [],
    },
    "stampede3": {  # Slurm knows nothing of the GPUs
        "conf": [_nodes(2, 48, 1, 1000000), _partition("h100", "MaxTime=48:00:00", "MaxNodes=4", WHOLE)],
        "rejected": ["--gres", "--gpus"],
        "overrides": [],
    },
}
