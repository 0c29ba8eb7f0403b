"""The section `cluster` of the config, as sections.py has the others."""

from dataclasses import dataclass, field

from hpc.config import cluster_rules
from hpc.config.errors import raise_problems


@dataclass
class ClusterConfig:
    """The machine, and what its scheduler is asked for. Leave a key null if its value is unknown.

    Each file in a project's configs/cluster/ begins with `defaults: [base]` and sets what differs. To add your cluster,
    copy slurm.yaml there to NAME.yaml, with that name. NAME.sh beside it, if there is one, is sourced by env.sh and by
    jobs: module load ...
    """

    name: str = "base"  # the name of the file
    scheduler: str | None = None  # slurm, pbs, or null for none
    required: list[str] = field(default_factory=list)  # keys that a job needs; submit.py lists those that are null

    account: str | None = None  # charged for the GPU hours; default: the one of configs/account.yaml
    partition: str | None = None  # with PBS: the queue
    qos: str | None = None  # quality of service
    constraint: str | None = None  # features that nodes must have, as for Slurm's --constraint
    time: str = "1:00:00"  # wall time of a job, "H:MM:SS" or "D-HH:MM:SS", always in quotes
    max_time: str | None = None  # longest wall time in this partition
    max_nodes: int | None = None  # most nodes of a job in this partition
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
    options: list[str] = field(default_factory=list)  # more options of sbatch or qsub: "-l filesystems=home:eagle"

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
        raise_problems(cluster_rules.problems(self))
