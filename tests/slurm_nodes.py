"""A real Slurm of several nodes on one machine, for tests: as root, with Debian's slurm-wlm and iproute2.

A node is a process tree with a network, hostname, process table, /etc/hosts and /dev/shm of its own; the file system is
shared, as on a cluster. Its process 1 reads from a pipe that pytest holds. When that closes, at the end of the tests or
because pytest was killed, process 1 ends, and the kernel kills what ran in the node and removes its network and mounts.
Nothing is written outside the given folder, and no daemon or file of the machine's own Slurm or munge is used.
"""

import ipaddress
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import slurm_accounts

NODES = ("n1", "n2", "n3", "n4")
CPUS, GPUS, MEMORY_MB = 8, 4, 16000  # resources that each node reports to Slurm

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "scancel", "sinfo", "ip", "unshare", "nsenter")
UNSHARE = ("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
PATH = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"  # not all users have sbin in their PATH
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}

_numbers = count()

# A requeued job starts after cred_expire (by default two minutes) and an ended one is remembered for MinJobAge. A node
# that has not answered for SlurmdTimeout is down, and its jobs are requeued.
COMMON = """\
ClusterName=test
SlurmctldHost=login({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
KillWait=5
SlurmdTimeout=20
MinJobAge=300
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
MpiDefault=none
"""
NODE = (
    "NodeName={name} NodeAddr={address} CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 "
    "RealMemory={memory} Gres=gpu:{gpus}\n"
)
# A job of `urgent` preempts those of `main`, which get SIGTERM and 20 s.
PARTITIONS = """\
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=DEFAULT Nodes=ALL MaxTime=1-00:00:00 DefMemPerCPU=1000 State=UP
PartitionName=main Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=urgent PriorityTier=2 PreemptMode=OFF
"""
# Inside a node. /sys is mounted anew to show its own network interfaces, and loses the cgroups by that.
SETUP = """\
mount --bind {hosts} /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mount -t sysfs sysfs /sys
ip link set lo up
"""
# Nodes without a slurmd count as there when they are in a cloud, where they are powered up for a job.
CONTROLLER_ONLY = """\
EnforcePartLimits=ALL
PrivateData=cloud
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=3600
NodeName=DEFAULT State=CLOUD
"""


def missing() -> str | None:
    """Return the reason why this machine cannot run the cluster, or None."""
    if os.geteuid() != 0:
        return "a Slurm with network namespaces needs root"
    programs = [program for program in PROGRAMS if not shutil.which(program, path=PATH)]
    if programs:
        return f"not installed: {', '.join(programs)} (apt install slurm-wlm munge iproute2)"
    probe = _run([*UNSHARE, "--net", "bash", "-c", "ip link add type veth && ip link add type bridge"], check=False)
    return None if probe.returncode == 0 else f"no network namespaces here: {probe.stdout.strip()}"


class Slurm:
    """The client side of one cluster. `env`: the variables with which Slurm commands reach this cluster."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.env = _environment() | {"SLURM_CONF": f"{folder}/slurm.conf"}
        self.machines: dict[str, subprocess.Popen] = {}
        self.addresses: dict[str, str] = {}

    def call(
        self, *command: str | Path, cwd: Path | None = None, check: bool = True, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node, which is this machine. Raise RuntimeError with its output if it fails."""
        return _run(command, check=check, env=self.env, cwd=cwd, timeout=timeout)

    def sbatch(self, *arguments: str | Path, cwd: Path | None = None) -> str:
        """Submit a job, and return its id."""
        return self.call("sbatch", "--parsable", *arguments, cwd=cwd).stdout.split()[-1].split(";")[0]

    def records(self, job: str) -> list[dict[str, str]]:
        """Return the records of `scontrol show job`: one per job, several for an array."""
        text = self.call("scontrol", "show", "job", job).stdout
        return [_fields(record) for record in text.strip().split("\n\n")]

    def show(self, job: str) -> dict[str, str]:
        """Return the fields of `scontrol show job` by their names, such as JobState, ExitCode, Restarts and StdOut."""
        return self.records(job)[0]

    def wait(self, job: str, seconds: float = 60) -> dict[str, str]:
        """Wait until a job or all elements of an array ended, and return its record. Cancel and raise on timeout."""
        self.until(job, lambda records: all(record["JobState"] in ENDED for record in records), seconds)
        return self.show(job)

    def until(self, job: str, reached: Callable[[list[dict[str, str]]], bool], seconds: float = 60) -> None:
        """Wait for `reached(records)`. On timeout cancel the job, and raise TimeoutError with records and log."""
        limit = time.monotonic() + seconds
        while not reached(records := self.records(job)):
            if time.monotonic() > limit:
                self.cancel(job)
                raise TimeoutError(f"job {job} after {seconds} s: {records}\n{_tail(Path(records[0]['StdOut']))}")
            time.sleep(0.2)

    def cancel(self, *arguments: str) -> None:
        """Call scancel with a job's id, or with options, as in cancel("--batch", "--signal=USR1", job)."""
        self.call("scancel", *arguments)

    def exec(
        self, node: str, *command: str | Path, cwd: Path | str = "/", check: bool = True, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside a node. It takes process ids of that node, as in exec("n2", "kill", "-9", pid)."""
        pid = self.machines[node].pid
        inside = ("--mount", "--uts", "--ipc", "--net", f"--pid=/proc/{pid}/ns/pid_for_children", f"--wdns={cwd}")
        return self.call("nsenter", f"--target={pid}", *inside, "--", *command, check=check, timeout=timeout)

    def hosts(self, node: str, **others: str) -> None:
        """Write a node's /etc/hosts: localhost and all names of the cluster, with other addresses if given.

        hosts("n1", n1="127.0.1.1") makes the entry that Debian's installer makes; hosts("n1") removes it.
        """
        names = "".join(f"{address} {name}\n" for name, address in (self.addresses | others).items())
        (self.folder / node / "hosts").write_text(f"127.0.0.1 localhost\n{names}")  # in place, as this file is mounted

    def cut(self, node: str) -> None:
        """Cut the node's network link. Its processes keep running, and Slurm marks the node as down after a while."""
        _ip(self.machines["switch"].pid, f"link set {node} down")

    def mend(self, node: str) -> None:
        """Restore the node's network link, and wait until Slurm can use the node."""
        _ip(self.machines["switch"].pid, f"link set {node} up")
        self.exec(node, "kill", "-HUP", self._slurmd(node))  # register now; Slurm would ask only after minutes
        self._await_node(node)

    def stop_slurmd(self, node: str) -> None:
        """Kill the node's slurmd. Its job steps keep running, and Slurm marks the node as down after a while."""
        pid = self._slurmd(node)
        self.exec(node, "kill", "-9", pid)
        self._await_end(node, pid)

    def start_slurmd(self, node: str) -> None:
        """Start the node's slurmd, and wait until Slurm can use the node."""
        self.exec(node, "slurmd", "-N", node, "-f", f"{self.folder}/slurm.conf")
        self._await_node(node)

    def reboot(self, node: str) -> None:
        """Simulate a reboot of a lost node: kill all its processes, restore its link and start a new slurmd."""
        self.exec(node, "sh", "-c", "kill -9 -1 || true")  # kill fails if no process is left
        self._await_end(node, self._slurmd(node))
        _ip(self.machines["switch"].pid, f"link set {node} up")
        self.start_slurmd(node)

    def _slurmd(self, node: str) -> str:
        return (self.folder / node / "slurmd.pid").read_text().strip()

    def _await_end(self, node: str, pid: str) -> None:
        _await(lambda: self.exec(node, "kill", "-0", pid, check=False).returncode != 0, self)

    def _await_node(self, node: str) -> None:
        question = ["sinfo", "--noheader", "--all", f"--nodes={node}", "--format=%T"]  # once for each partition
        # Other states are down and unknown. An asterisk after the state means that the node does not respond.
        up = {"idle", "mixed", "allocated", "completing"}
        _await(lambda: set(self.call(*question).stdout.split()) <= up, self)


@contextmanager
def cluster(
    folder: Path,
    nodes: tuple[str, ...] = NODES,
    *,
    node: str = NODE,
    gpu_type: str = "",
    partitions: str = PARTITIONS,
    accounts: Sequence[str] = (),
) -> Iterator[Slurm]:
    """Start nodes that run jobs. Raise RuntimeError if they do not come up.

    Args:
        node: the line of slurm.conf for each of them, with `{name}`, `{address}` and others.
        gpu_type: the type of GPU, if they have one.
        partitions: lines of slurm.conf.
        accounts: commands of sacctmgr that make accounts; Slurm has a database of accounts if there are any.
    """
    _require(folder)
    network = _free_network()
    login, *others = (str(address) for address in list(network.hosts())[: len(nodes) + 1])
    slurm = Slurm(folder)
    slurm.addresses = {"login": login} | dict(zip(nodes, others, strict=True))
    with ExitStack() as stack:
        for name in nodes:
            (folder / name / "spool").mkdir(parents=True)
            slurm.hosts(name)
            setup = SETUP.format(hosts=folder / name / "hosts")
            slurm.machines[name] = stack.enter_context(_machine(name, setup, "--net"))
        stack.enter_context(_network(slurm, network.prefixlen))
        _make_devices(folder, gpu_type)
        claims = {"cpus": CPUS, "gpus": GPUS, "memory": MEMORY_MB}
        lines = [node.format(name=name, address=slurm.addresses[name], **claims) for name in nodes]
        stack.enter_context(_controller(slurm, login, "".join(lines) + partitions, accounts))
        for name in nodes:
            slurm.start_slurmd(name)
        yield slurm


@contextmanager
def controller_only(folder: Path, nodes_and_partitions: str, *, accounts: Sequence[str] = ()) -> Iterator[Slurm]:
    """Start only a slurmctld with these NodeName and PartitionName lines. It accepts or rejects jobs, and runs none."""
    _require(folder)
    slurm = Slurm(folder)
    with _controller(slurm, "127.0.0.1", CONTROLLER_ONLY + nodes_and_partitions, accounts):
        yield slurm


@contextmanager
def _machine(name: str, setup: str, *namespaces: str) -> Iterator[subprocess.Popen]:
    """Create namespaces, and run `setup` in them with bash. They exist until the pipe to their process 1 closes."""
    command = [*UNSHARE, *namespaces, "bash", "-c", f"set -e; hostname {name}\n{setup}\necho up; read -r _"]
    process = subprocess.Popen(
        command,
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # only pytest receives Ctrl-C
    )
    assert process.stdin and process.stdout
    try:
        if (line := process.stdout.readline()) != b"up\n":
            raise RuntimeError(f"cannot set up {name}: {(line + process.stdout.read()).decode()}")
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(5)  # process 1 ends after all others in its PID namespace
        except subprocess.TimeoutExpired:  # a fork of pytest still holds the pipe
            process.kill()
            process.wait()
        process.stdout.close()


@contextmanager
def _network(slurm: Slurm, prefix: int) -> Iterator[None]:
    """Connect the nodes and this machine by a bridge in its own namespace, without routes to other networks."""
    port = f"slurm{os.getpid()}-{next(_numbers)}"  # at most 15 characters, unique to this run
    ends = {"login": (os.getpid(), port)} | {node: (machine.pid, "eth0") for node, machine in slurm.machines.items()}
    with _machine("switch", "ip link add bridge type bridge; ip link set bridge up", "--net") as switch:
        slurm.machines["switch"] = switch
        try:
            for name, (pid, end) in ends.items():
                _ip(switch.pid, f"link add {name} type veth peer name {end} netns {pid}")
                _ip(switch.pid, f"link set {name} master bridge up")
                _ip(pid, f"address add {slurm.addresses[name]}/{prefix} dev {end}")
                _ip(pid, f"link set {end} up")
            yield
        finally:
            _run(["ip", "link", "delete", port], check=False)  # the end of the switch removes it, but later


def _ip(pid: int, arguments: str) -> None:
    """Run `ip` in the network namespace of a process."""
    _run(["nsenter", f"--target={pid}", "--net", "ip", *arguments.split()])


@contextmanager
def _controller(slurm: Slurm, address: str, nodes_and_partitions: str, accounts: Sequence[str]) -> Iterator[None]:
    """Start munged and slurmctld, and before it a database of accounts if there are any."""
    folder = slurm.folder
    (folder / "state").mkdir()
    common = COMMON.format(folder=folder, address=address, port=_free_port())
    dbd_port = _free_port()
    enforced = slurm_accounts.ENFORCED.format(folder=folder, address=address, port=dbd_port) if accounts else ""
    (folder / "slurm.conf").write_text(common + enforced + nodes_and_partitions)
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    with _machine("login", "true") as login:
        slurm.machines["login"] = login
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={folder}/munge.{suffix}" for option, suffix in files.items()]
        slurm.exec("login", "munged", "--force", *munge)  # --force: accept the folder's permissions
        if accounts:
            _start_accounts(slurm, address, dbd_port)
        slurm.exec("login", "slurmctld", "-f", f"{folder}/slurm.conf")
        _await(lambda: slurm.call("scontrol", "ping", check=False).returncode == 0, slurm)
        for command in accounts:
            slurm.call("sacctmgr", "--immediate", *shlex.split(command))
        yield


def _start_accounts(slurm: Slurm, address: str, port: int) -> None:
    """Start a database and slurmdbd, with the cluster and no account."""
    folder = slurm.folder
    slurm_accounts.install_database(folder)
    slurm_accounts.write_config(folder, address, port)
    slurm.exec("login", "bash", "-c", slurm_accounts.DATABASE.format(folder=folder))
    _await(lambda: (folder / "database.socket").exists(), slurm)
    slurm.exec("login", "env", f"MYSQL_UNIX_PORT={folder}/database.socket", "slurmdbd")
    _await(lambda: slurm.call("sacctmgr", "-i", "add", "cluster", "test", check=False).returncode == 0, slurm)


def _make_devices(folder: Path, gpu_type: str) -> None:
    """Make device files for the GPUs, as Slurm sets CUDA_VISIBLE_DEVICES only for those. They act as /dev/null."""
    (folder / "dev").mkdir()
    for gpu in range(GPUS):
        os.mknod(folder / f"dev/nvidia{gpu}", 0o600 | 0o020000, os.makedev(1, 3))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # it alone accepts an empty /sys/fs/cgroup
    kind = f" Type={gpu_type}" if gpu_type else ""
    devices = f"{folder}/dev/nvidia[0-{GPUS - 1}]"
    (folder / "gres.conf").write_text(f"Name=gpu{kind} File={devices} Flags=nvidia_gpu_env\n")


def _await(condition: Callable[[], bool], slurm: Slurm, seconds: float = 30) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            files = [*slurm.folder.glob("*.log"), *slurm.folder.glob("*/slurmd.log")]
            logs = "\n".join(f"{log}:\n{_tail(log)}" for log in files)
            raise RuntimeError(f"Slurm is not up after {seconds} s\n{logs}")
        time.sleep(0.05)


def _require(folder: Path) -> None:
    if reason := missing():
        raise RuntimeError(reason)
    if len(f"{folder}/munge.socket") > 100 or re.search(r"[^\w./+-]", str(folder)):
        raise ValueError(f"{folder}: too long for a socket's path, or a character that slurm.conf cannot hold")


def _free_network() -> ipaddress.IPv4Network:
    """Return a /24 of 10.64.0.0/10 to which this machine has no route."""
    words = re.findall(r"\b\d+(?:\.\d+){3}(?:/\d+)?", _run(["ip", "-4", "route", "show", "table", "all"]).stdout)
    taken = [ipaddress.IPv4Network(word, strict=False) for word in words]
    networks = list(ipaddress.IPv4Network("10.64.0.0/10").subnets(new_prefix=24))
    first = os.getpid() % len(networks)  # runs that start together try different ones first
    for network in networks[first:] + networks[:first]:
        if not any(network.overlaps(other) for other in taken):
            return network
    raise RuntimeError("this machine has routes into all of 10.64.0.0/10")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _environment() -> dict[str, str]:
    """Return this environment without variables of a surrounding job or another cluster."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "PYTEST_"))}
    return kept | {"PATH": PATH}


def _run(
    command: Sequence[str | Path],
    check: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 60,
) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        command,
        env=env or _environment(),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    if check and result.returncode != 0:
        raise RuntimeError(f"exit code {result.returncode} of {command}: {result.stdout.strip()}")
    return result


def _fields(record: str) -> dict[str, str]:
    """Return the NAME=value fields of one record. Values such as paths may contain spaces."""
    key = r"[A-Z][\w/:]*="
    return dict(re.findall(rf"(?m)(?:^|\s)({key[:-1]})=(.*?)(?=\s+{key}|\s*$)", record))


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:]) if log.is_file() else f"no {log}"
