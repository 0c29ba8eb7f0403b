"""Train the given command lines in this process, one after the other. Started by conftest.py, once per rank."""

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

import train
from hpc.config import arguments, compose, parse
from hpc.launch import placement, rendezvous
from hpc.run import directory, signals
from hpc.run.program import RankProcess
from hpc.training import starting_point


def main(out: str, cases: dict[str, list[str]]) -> None:
    here, metrics = placement.read_placement(os.environ), {}
    this = RankProcess([], here, signals.install_signal_handlers())
    open_store = rendezvous.open_store
    store = cache(
        lambda: open_store(here, os.environ, timeout_seconds=60)
    )  # all cases share one store, and so one process group
    for name, overrides in cases.items():
        rendezvous.open_store = lambda *_, name=name, **__: prefixed(name, store())
        cfg = compose.compose_overrides(overrides)
        arguments.check_files(parse.parse(cfg))
        metrics[name] = train.train(cfg, this)
        for key in (directory.RUN_DIR_VARIABLE, starting_point.BEGUN_VARIABLE):
            os.environ.pop(key, None)  # this run set it
    if any(metrics.values()):  # rank 0
        Path(out).write_text(json.dumps(metrics))


def prefixed(name: str, store: Any) -> Any:
    from torch.distributed import PrefixStore

    return PrefixStore(name, store)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
