"""Check that ranks meet at the store of their own launch and join no other, whatever listens on the node."""

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from fork import free_port

from hpc.config import errors
from hpc.config.errors import ConfigError, ExitCode, StartFailed
from hpc.launch import placement, rendezvous
from hpc.launch.placement import Placement

FIRST = Placement("srun", 0, 8, 0, 4, "n08", "3")
SIXTH = Placement("srun", 5, 8, 1, 4, "n08", "3")
HERE = [Placement("mpiexec (MPICH)", rank, 2, rank, 2) for rank in (0, 1)]


def key(place: Placement, **environ: str) -> str:
    return rendezvous.launch_key(place, environ)


def test_a_key_is_common_to_the_ranks_of_one_launch_alone() -> None:
    one = key(FIRST, SLURM_JOB_ID="17")
    assert key(SIXTH, SLURM_JOB_ID="17") == one
    others = [
        key(SIXTH, SLURM_JOB_ID="17", SLURM_RESTART_COUNT="1"),
        key(SIXTH, SLURM_JOB_ID="18"),
        key(Placement("srun", 5, 8, 1, 4, "n08", "4"), SLURM_JOB_ID="17"),
        key(Placement("srun", 1, 2, 1, 2, "n08", "3"), SLURM_JOB_ID="17"),
        key(SIXTH, SLURM_JOB_ID="17", MASTER_PORT="5"),
    ]
    assert len({*others, one}) == len({rendezvous.derive_port(other) for other in [*others, one]}) == 6
    assert all(10000 <= rendezvous.derive_port(other) < 30000 for other in others)
    keys = [key(HERE[rank], PBS_JOBID="17.server", PBS_JOBCOOKIE=cookie) for cookie in "ab" for rank in (0, 1)]
    assert keys[0] == keys[1] != keys[2] == keys[3], "PBS has started the job again"


def test_ranks_in_wrappers_of_their_own_have_an_exported_port_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for parent in (17, 18):
        monkeypatch.setattr(rendezvous.os, "getppid", lambda parent=parent: parent)
        keys.append((key(HERE[0]), key(HERE[1], MASTER_PORT="5")))
    assert keys[0][0] != keys[1][0] and keys[0][1] == keys[1][1]


@pytest.mark.parametrize("port", ["abc", "0", "65536", "-1", " 5"])
def test_an_exported_port_that_is_none_is_rejected(port: str) -> None:
    with pytest.raises(ConfigError, match="must be a port number"):
        rendezvous.open_store(SIXTH, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, timeout_seconds=1)


# -- With real stores --


@pytest.fixture
def service() -> Iterator[Callable[[str], int]]:
    """Return a function that runs another user's program at a port, which it returns."""
    held: list[socket.socket] = []

    def serve(kind: str) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        held.append(listener)

        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                    held.append(connection)
                    if kind == "echoes":
                        connection.sendall(connection.recv(4096))
                    elif kind != "is silent":
                        connection.sendall({"greets": b"SSH-2.0-OpenSSH\n", "answers in JSON": b"[1]\n"}.get(kind, b""))
                        connection.close()
                except OSError:
                    return

        threading.Thread(target=run, daemon=True).start()
        return listener.getsockname()[1]

    yield serve
    for one in held:
        one.close()


def where(port: int, **environ: str) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | environ


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["is silent", "closes", "echoes", "greets", "answers in JSON"])
def test_a_taken_port_ends_this_start_and_allows_another(
    kind: str, service: Callable, capfd: pytest.CaptureFixture[str]
) -> None:
    port = service(kind)
    with pytest.raises(SystemExit) as ended, errors.exit_on_config_error(is_reporting_rank=False):
        rendezvous.open_store(HERE[0], where(port), timeout_seconds=10)
    assert ended.value.code == ExitCode.FAILED, "a job that is rejected would not start again"
    assert f"MASTER_PORT must be free on {socket.gethostname()}, where rank 0 listens" in capfd.readouterr().err
    if kind != "is silent":
        with pytest.raises(ConfigError, match=r"must lead to rank 0, which rank 1 on .* did not reach within 1 s"):
            rendezvous.open_store(HERE[1], where(port), timeout_seconds=1)


def waits_for_nothing(rank: int, port: int) -> None:
    rendezvous.GRACE_SECONDS = 1
    rendezvous.open_store(HERE[1], where(port), timeout_seconds=1)


@pytest.mark.slow
def test_a_program_that_says_nothing_is_not_waited_for_longer(service: Callable, together: Callable) -> None:
    assert together(waits_for_nothing, 1, service("is silent"), seconds=60) == [None], "ended by its limit"


@pytest.fixture
def first() -> Iterator[tuple[object, int]]:
    """Rank 0 of a launch in job 17, and its port."""
    environ = where(free_port(), SLURM_JOB_ID="17")
    yield rendezvous.open_store(HERE[0], environ, timeout_seconds=20), int(environ["MASTER_PORT"])


def test_a_rank_of_another_launch_is_rejected_and_does_no_harm(first: tuple) -> None:
    store, port = first
    for words in ({"SLURM_JOB_ID": "18"}, {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"}, {}):
        for place in HERE:
            with pytest.raises(StartFailed, match="must be free"):
                rendezvous.open_store(place, where(port, **words), timeout_seconds=20)
    rendezvous.open_store(HERE[1], where(port, SLURM_JOB_ID="17"), timeout_seconds=20).set("met", "1")
    assert store.get("met") == b"1"


def test_of_two_launches_with_one_key_each_rank_has_one_seat(first: tuple) -> None:
    _, port = first
    rendezvous.open_store(HERE[1], where(port, SLURM_JOB_ID="17"), timeout_seconds=20)
    for place in HERE:
        with pytest.raises(StartFailed, match="must be free"):
            rendezvous.open_store(place, where(port, SLURM_JOB_ID="17"), timeout_seconds=20)


def test_a_rank_0_that_comes_late_is_found() -> None:
    port, met = free_port(), []

    def join() -> None:
        met.append(rendezvous.open_store(HERE[1], where(port), timeout_seconds=60))

    early = threading.Thread(target=join)
    early.start()
    early.join(0.5)
    assert early.is_alive()
    store = rendezvous.open_store(HERE[0], where(port), timeout_seconds=60)
    early.join(60)
    met[0].set("late", "1")
    assert store.get("late") == b"1"


def test_a_rank_0_that_does_not_come_is_not_waited_for_longer_than_told() -> None:
    with pytest.raises(ConfigError, match=r"must lead to rank 0, which rank 1 on .* did not reach within 0\.1 s"):
        rendezvous.open_store(Placement("srun", 1, 2, 0, 1), where(free_port()), timeout_seconds=0.1)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[os._Environ]:
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    yield os.environ
    os.environ.clear()
    os.environ.update(before)


def test_torchrun_must_have_its_port_for_itself(environ: os._Environ) -> None:
    from torch.distributed import TCPStore  # pyright: ignore

    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port), "TORCHELASTIC_RUN_ID": "none"})
    rendezvous.open_store(Placement("torchrun", 0, 2, 0, 2), environ, timeout_seconds=10)
    rendezvous.open_store(Placement("torchrun", 1, 2, 1, 2), environ, timeout_seconds=10)
    for rank, job in ((1, ""), (0, ""), (0, "18"), (1, "18")):  # a rank that is already taken, and another job
        environ["SLURM_JOB_ID"] = job
        with pytest.raises(ConfigError, match="must be a port that no other launch uses"):
            rendezvous.open_store(Placement("torchrun", rank, 2, rank, 2), environ, timeout_seconds=10)


def meets(rank: int, words: list[str], port: int) -> list[object]:
    """Meet as one of two launches of two ranks each that share a job and a port; return what it has heard or met."""
    sys.argv = ["train.py", words[rank // 2]]
    os.environ.update({"SLURM_JOB_ID": "17", "MASTER_PORT": str(port)})
    place = Placement("srun", rank % 2, 2, rank % 2, 2, "n1", str(rank // 2) if words[0] != words[1] else "0")
    placement.export_rank_variables(place, os.environ, host_suffix="")
    try:
        store = rendezvous.open_store(place, os.environ, timeout_seconds=30)
        value = {"rank": rank % 2, "host": "n1", "words": sys.argv[1]}
        heard = rendezvous.all_gather_json(store, place, topic="facts", value=value, timeout_seconds=5)
        result: list[object] = [[said["rank"], said["words"]] for said in heard]
    except ConfigError as error:
        result = [type(error).__name__]
    torch.distributed.barrier()  # the store stays until the last of all four has come, as while a run trains
    return result


@pytest.mark.slow
@pytest.mark.parametrize("words", [["seed=1", "seed=2"], ["seed=1", "seed=1"]])
def test_of_two_launches_at_one_port_one_starts_and_none_is_mixed(words: list[str], together: Callable) -> None:
    said = together(meets, 4, words, free_port())
    if words[0] != words[1]:
        launches = [said[:2], said[2:]]
        (started,) = (number for number in (0, 1) if launches[number][0] != ["StartFailed"])
        assert launches[started] == [[[0, words[started]], [1, words[started]]]] * 2
        assert launches[1 - started] == [["StartFailed"]] * 2
    else:  # nothing tells them apart: whoever has a seat meets, and each number is there once
        met = [heard for heard in said if heard != ["StartFailed"]]
        assert met == [[[0, "seed=1"], [1, "seed=1"]]] * 2
