"""Check that ranks find the store of their own launch and join no other, whatever listens on the node."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from fork import free_port

from hpc.config.errors import ConfigError
from hpc.launch import meeting, placement, rendezvous
from hpc.launch.placement import Placement
from hpc.launch.rendezvous import LaunchIdentity, PortServer

FIRST = Placement("srun", 0, 8, 0, 4, "n08", "3")
SIXTH = Placement("srun", 5, 8, 1, 4, "n08", "3")
HERE = [Placement("mpiexec (MPICH)", rank, 2, rank, 2) for rank in (0, 1)]


def identity(place: Placement, **environ: str) -> LaunchIdentity:
    return LaunchIdentity.from_environ(place, environ)


def test_ports_are_common_to_the_ranks_of_one_launch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one = identity(FIRST, SLURM_JOB_ID="17")
    assert identity(SIXTH, SLURM_JOB_ID="17") == one
    assert set(one.ports) <= set(range(10000, 30000)) and len(set(one.ports)) > 30
    others = [
        identity(SIXTH, SLURM_JOB_ID="17", SLURM_RESTART_COUNT="1"),
        identity(SIXTH, SLURM_JOB_ID="18"),
        identity(Placement("srun", 5, 8, 1, 4, "n08", "4"), SLURM_JOB_ID="17"),
        identity(Placement("srun", 1, 2, 1, 2, "n08", "3"), SLURM_JOB_ID="17"),
    ]
    assert len({other.key for other in [one, *others]}) == len({other.ports[0] for other in [one, *others]}) == 5
    keys = [identity(HERE[rank], PBS_JOBID="17.server", PBS_JOBCOOKIE=cookie).key for cookie in "ab" for rank in (0, 1)]
    assert keys[0] == keys[1] != keys[2] == keys[3], "PBS has started the job again"
    assert identity(SIXTH, SLURM_JOB_ID="17", MASTER_PORT="5").ports[0] == 5
    monkeypatch.setattr(sys, "argv", ["train.py", "seed=2"])
    assert identity(SIXTH, SLURM_JOB_ID="17").command != one.command


def test_ranks_in_wrappers_of_their_own_have_an_exported_port_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for parent in (17, 18):
        monkeypatch.setattr(rendezvous.os, "getppid", lambda parent=parent: parent)
        keys.append((identity(HERE[0]).key, identity(HERE[1], MASTER_PORT="5").key))
    assert keys[0][0] != keys[1][0] and keys[0][1] == keys[1][1]


@pytest.mark.parametrize("port", ["abc", "0", "65536", "-1", "", " 5"])
def test_an_exported_port_that_is_none_is_rejected(port: str) -> None:
    if port:
        with pytest.raises(ConfigError, match="must be a port number"):
            identity(SIXTH, MASTER_PORT=port)
    else:
        assert identity(SIXTH, MASTER_PORT=port).ports[0] >= 10000


@pytest.fixture
def ports() -> tuple[int, ...]:
    return tuple(free_port() for _ in range(8))


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, str], None]]:
    """Return a function that runs another user's program at a port."""
    monkeypatch.setattr(rendezvous, "ANSWER_SECONDS", 0.2)
    held: list[socket.socket] = []

    def serve(port: int, kind: str) -> None:
        listener = socket.create_server(("127.0.0.1", port))
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

    yield serve
    for one in held:
        one.close()


@pytest.mark.parametrize("kind", ["is silent", "closes", "echoes", "greets", "answers in JSON"])
def test_whatever_else_listens_is_passed_over(kind: str, service: Callable, ports: tuple[int, ...]) -> None:
    service(ports[0], kind)
    one = LaunchIdentity("one", "w", ports)
    reception = PortServer(one, 4321, timeout_seconds=10)
    assert reception._socket.getsockname()[1] == ports[1]
    assert rendezvous.find_store_port(one, HERE[1], host="127.0.0.1", timeout_seconds=10) == 4321
    assert rendezvous.find_store_port(one, HERE[0], host="127.0.0.1", timeout_seconds=10) == 4321, (
        "each rank has its seat"
    )
    with pytest.raises(TimeoutError):
        rendezvous.find_store_port(LaunchIdentity("other", "w", ports), HERE[1], host="127.0.0.1", timeout_seconds=0.3)


def test_launches_that_look_alike_keep_their_own_ranks(ports: tuple[int, ...]) -> None:
    a, b = LaunchIdentity("same", "seed=1", ports), LaunchIdentity("same", "seed=2", ports)
    for one, port in ((a, 1111), (b, 2222), (a, 3333)):
        PortServer(one, port, timeout_seconds=10)
    assert rendezvous.find_store_port(b, HERE[1], host="127.0.0.1", timeout_seconds=10) == 2222
    assert [rendezvous.find_store_port(a, HERE[1], host="127.0.0.1", timeout_seconds=10) for _ in range(2)] == [
        1111,
        3333,
    ]


def test_ranks_that_were_started_with_other_words_meet_to_be_told(ports: tuple[int, ...]) -> None:
    PortServer(LaunchIdentity("same", "seed=0", ports), 1111, timeout_seconds=10)
    begun = time.monotonic()
    assert (
        rendezvous.find_store_port(
            LaunchIdentity("same", "seed=1", ports), HERE[1], host="127.0.0.1", timeout_seconds=0.9
        )
        == 1111
    )
    assert time.monotonic() - begun > 0.3


def test_who_asks_as_no_rank_does_hears_nothing(ports: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "ANSWER_SECONDS", 0.2)
    one = LaunchIdentity("one", "w", ports)
    PortServer(one, 4321, timeout_seconds=10)
    for said in (b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"key": "one"}\n', b"\xff" * 5000, b"[" * 4000):
        with socket.create_connection(("127.0.0.1", ports[0]), timeout=5) as connection:
            connection.sendall(said)
            with suppress(ConnectionResetError):
                assert b"4321" not in connection.recv(100)
    assert rendezvous.find_store_port(one, HERE[1], host="127.0.0.1", timeout_seconds=10) == 4321


def test_a_rank_0_that_comes_late_is_found_soon(monkeypatch: pytest.MonkeyPatch, ports: tuple[int, ...]) -> None:
    pauses, one = [], LaunchIdentity("one", "w", ports)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 13:
            PortServer(one, 4321, timeout_seconds=10)

    monkeypatch.setattr(rendezvous.time, "sleep", pause)
    assert rendezvous.find_store_port(one, HERE[1], host="127.0.0.1", timeout_seconds=60) == 4321
    assert pauses == [0.1] * 13


def test_a_rank_0_that_does_not_come_is_not_waited_for_longer_than_told(ports: tuple[int, ...]) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    with pytest.raises(ConfigError, match=r"must lead to rank 0, which rank 1 on .* did not reach within 0\.1 s"):
        meeting.open_store(Placement("srun", 1, 2, 0, 1), where, timeout_seconds=0.1)


def test_no_free_port_is_told(ports: tuple[int, ...]) -> None:
    with (
        socket.create_server(("127.0.0.1", ports[0])),
        pytest.raises(ConfigError, match=r"must be free on .*, where rank 0 listens"),
    ):
        PortServer(LaunchIdentity("one", "w", ports[:1]), 4321, timeout_seconds=10)


# -- With real stores --


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[os._Environ]:
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    yield os.environ
    os.environ.clear()
    os.environ.update(before)


def test_the_store_of_a_neighbour_is_not_joined(environ: os._Environ) -> None:
    from torch.distributed import TCPStore  # pyright: ignore

    neighbour = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ["MASTER_PORT"] = str(neighbour.port)
    alone = Placement("srun", 0, 1, 0, 1, "n1", "0")
    placement.export_rank_variables(alone, environ, host_suffix="")
    store = meeting.open_store(alone, environ, timeout_seconds=10)
    store.set("mine", "1")
    assert not neighbour.check(["preflight/mine"])
    assert environ["MASTER_PORT"] != str(neighbour.port)


def test_torchrun_must_have_its_port_for_itself(environ: os._Environ) -> None:
    from torch.distributed import TCPStore  # pyright: ignore

    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port), "TORCHELASTIC_RUN_ID": "none"})
    place = Placement("torchrun", 1, 2, 1, 2)
    meeting.open_store(place, environ, timeout_seconds=10)
    for rank, job in ((1, ""), (0, "18")):  # a rank number that is already taken, and another job
        environ["SLURM_JOB_ID"] = job
        with pytest.raises(ConfigError, match="must be a port that no other launch uses"):
            meeting.open_store(Placement("torchrun", rank, 2, rank, 2), environ, timeout_seconds=10)


def meets(rank: int, words: list[str]) -> list[object]:
    """Meet as one of two launches of two ranks each that share a job id."""
    sys.argv = ["train.py", words[rank // 2]]
    os.environ.update({"SLURM_JOB_ID": "17"})
    place = Placement("srun", rank % 2, 2, rank % 2, 2, "n1", "0")
    placement.export_rank_variables(place, os.environ, host_suffix="")
    store = meeting.open_store(place, os.environ, timeout_seconds=30)
    value = {"rank": rank % 2, "host": "n1", "words": sys.argv[1]}
    heard = meeting.all_gather_json(store, place, topic="facts", value=value, timeout_seconds=30)
    return [os.environ["MASTER_PORT"], *([said["rank"], said["words"]] for said in heard)]


@pytest.mark.slow
@pytest.mark.parametrize("words", [["seed=1", "seed=2"], ["seed=1", "seed=1"]])
def test_two_launches_at_once_with_one_name(words: list[str], together: Callable) -> None:
    said = together(meets, 4, words)
    for rank, (_, *heard) in enumerate(said):
        assert heard == [[0, words[rank // 2]], [1, words[rank // 2]]]
    assert sorted(port for port, *_ in said) == sorted([said[0][0], said[2][0]] * 2) and said[0][0] != said[2][0]
