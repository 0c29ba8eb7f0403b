"""Train the given command lines in this process, one after the other. Started by conftest.py, once per rank."""

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train
from {{ cookiecutter.package_name }}.hpc import launch, meeting, rundir
from {{ cookiecutter.package_name }}.hpc.checks import preflight
from {{ cookiecutter.package_name }}.hpc.jobs import commandline
from {{ cookiecutter.package_name }}.hpc.running import begin, watch


def main(out: str, cases: dict[str, list[str]]) -> None:
    warned = watch.listen()
    here, metrics = launch.place(os.environ), {}
    meet = meeting.meet
    store = cache(lambda: meet(here, os.environ, 60))  # one for all cases: their process group is one, too
    for name, overrides in cases.items():
        meeting.meet = lambda *_, name=name: prefixed(name, store())
        cfg = commandline.compose_overrides(overrides)
        preflight.check(cfg)
        metrics[name] = train.train(cfg, here, warned)
        for key in (rundir.CHOSEN, begin.BEGUN):
            os.environ.pop(key, None)  # it was this run's
    if any(metrics.values()):  # rank 0
        Path(out).write_text(json.dumps(metrics))


def prefixed(name: str, store: Any) -> Any:
    from torch.distributed import PrefixStore

    return PrefixStore(name, store)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
