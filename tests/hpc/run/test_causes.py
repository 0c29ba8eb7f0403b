"""Check which rank is named when all that others have left is that some rank is gone."""

import json
import threading

import pytest
from torch.distributed import HashStore

from hpc.run import causes
from hpc.run.causes import RankError
from hpc.run.peers import Peers

HOSTS = ["p1", "p2", "p3"]
GONE = f"{causes.ENDED}: rank 0 is gone: its store has been silent for 61 s"
BROKEN = "RuntimeError: [x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.99.7.3]:1"


def blamed(errors: dict[int, str], hosts: list[str] = HOSTS, per_host: int = 2) -> str:
    files = [RankError(10 - rank, rank, hosts[rank // per_host], error) for rank, error in errors.items()]
    cause = causes.first_cause(files, world_size=per_host * len(hosts), hosts=hosts)
    return cause.line if cause else ""


@pytest.mark.parametrize("others", [{}, {0: BROKEN, 1: BROKEN, 2: BROKEN, 3: BROKEN}, {1: BROKEN, 2: BROKEN}])
def test_a_node_that_alone_lost_rank_0_was_cut_off(others: dict[int, str]) -> None:
    assert blamed(others | {4: GONE, 5: GONE}).startswith("rank 4 on p3 lost rank 0, as no other node did")


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        (dict.fromkeys(range(2, 6), GONE), "rank 0 on p1 ended without an error, as did 1 more (killed?)"),
        (dict.fromkeys(range(1, 6), GONE), "rank 0 on p1 ended without an error (killed?)"),
        (dict.fromkeys((0, 1, 2, 4), BROKEN) | {5: GONE}, "rank 3 on p2 ended without an error (killed?)"),
        (dict.fromkeys((1, 5), GONE), "rank 0 on p1 ended without an error, as did 3 more (killed?)"),
        ({4: GONE, 5: GONE, 2: "OSError: stale file handle"}, "rank 2 on p2: OSError: stale file handle"),
    ],
    ids=["first node", "rank 0", "another rank", "rank 0 of slow ones", "an error"],
)
def test_a_rank_that_ended_is_named(errors: dict[int, str], expected: str) -> None:
    assert blamed(errors) == expected


def test_of_two_nodes_nobody_knows_which_one_was_cut_off() -> None:
    errors = {2: GONE, 3: GONE}
    expected = "rank 0 on p1 ended without an error, as did 1 more (killed, or p2 cut off?)"
    assert blamed(errors, ["p1", "p2"]) == expected
    assert blamed(errors | {1: GONE}, ["p1", "p2"]) == "rank 0 on p1 ended without an error (killed?)"


def test_of_two_ranks_that_fail_at_once_the_first_report_wins() -> None:
    class Racing:
        """A store in which both ranks look before either has written."""

        def __init__(self) -> None:
            self.store, self.both = HashStore(), threading.Barrier(2)

        def clone(self) -> "Racing":
            return self

        def check(self, keys: list[str]) -> bool:
            seen = self.store.check(keys)
            self.both.wait(10)
            return seen

        def set(self, key: str, value: str) -> None:
            self.store.set(key, value)
            written.append(json.loads(value)["rank"])

        def compare_set(self, key: str, expected: str, value: str) -> bytes:
            self.both.wait(10)
            kept = self.store.compare_set(key, expected, value)
            written.extend([json.loads(value)["rank"]] if kept.decode() == value else [])
            return kept

    written: list[int] = []
    store = Racing()
    ranks = [
        threading.Thread(target=Peers(store, 2).report_failure, args=[rank], kwargs={"host": "n1", "error": "E: x"})
        for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert written == [json.loads(store.store.get("watch/failed"))["rank"]]
