"""Train the given command lines in this process, one after the other. Started by conftest.py, once per rank."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train
from {{ cookiecutter.package_name }}.hpc import commandline, launch, preflight, rundir


def main(out: str, cases: dict[str, list[str]]) -> None:
    metrics = {}
    for name, overrides in cases.items():
        cfg = commandline.compose_overrides(overrides)
        preflight.check(cfg)
        metrics[name] = train.train(cfg, launch.place(os.environ))
        os.environ.pop(rundir.CHOSEN, None)  # it was this run's
    if any(metrics.values()):  # rank 0
        Path(out).write_text(json.dumps(metrics))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
