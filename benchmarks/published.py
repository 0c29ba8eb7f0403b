"""The planner's step times against published ones: python benchmarks/published.py [--out results.json]"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml
from rows import report, row

HERE = Path(__file__).resolve().parent
PAPER = ("ZeRO-3", "PTD-P")  # tables of published.yaml that are table 2 of arXiv 2104.04473


@dataclass(frozen=True)
class Run:
    """A published run: what is known of it, and what was measured."""

    table: str
    name: str
    network: Any  # decoder.Decoder
    setup: Any  # hpc.plan.setup.Setup
    gpu: str
    node_gbs: float
    unit: str
    counts: int  # how many times forward of a block is in its FLOPs
    measured: float
    days: float | None  # for 300 billion tokens
    fitted: bool

    @property
    def speed(self) -> float:
        return speed(self, self.measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a list of rows, in JSON")
    asked = parser.parse_args()
    with project():
        told = {run: predicted(run) for run in runs()}
        took = {run: days(run) for run in told if run.days}
    for run, value in told.items():
        said = f"{value:9.4g} for {run.measured:<9.4g} {run.unit:8} {error(run, value):+6.1%}"
        mark = " fitted" if run.fitted else ""
        if run.days:
            mark += f" {took[run]:.0f} for {run.days} days"
        print(f"{run.table:48} {run.name:44} {said} {mark}")
    report(judged(told, took), asked.out)


@contextmanager
def project() -> Iterator[None]:
    """A baked project whose modules can be imported."""
    from fork import fork

    with tempfile.TemporaryDirectory() as folder:
        path = str(fork(Path(folder)) / "src")
        sys.path.insert(0, path)
        try:
            yield
        finally:
            sys.path.remove(path)


def runs() -> Iterator[Run]:
    """What published.yaml holds."""
    known = yaml.safe_load((HERE / "published.yaml").read_text(encoding="utf-8"))
    for table in known["tables"]:
        for values in table["rows"]:
            yield _run(table, values, known["networks"])


def _run(table: dict[str, Any], values: Sequence[Any], networks: dict[str, Any]) -> Run:
    from decoder import Decoder

    from hpc.plan.setup import Setup

    cells = table["run"] | table["how"] | dict(zip(table["columns"], values, strict=False))
    how, setting = ({field.name for field in fields(kind)} & set(cells) for kind in (Decoder, Setup))
    network = Decoder(**networks[cells["network"]] | {key: cells[key] for key in how})
    setup = Setup(devices=table["devices"], **{key: cells[key] for key in setting})
    varied = [f"{key} {cells[key]}" for key in table["columns"] if key in ("time", "micro_batch", "pipeline")]
    return Run(
        table=table["name"],
        name=", ".join([cells["network"], f"{setup.world_size} GPUs", *varied]),
        network=network,
        setup=setup,
        gpu=table["gpu"],
        node_gbs=table["node_gbs"],
        unit=table["unit"],
        counts=table.get("counts", 3),
        measured=cells["measured"],
        days=cells.get("days"),
        fitted=values[-1] == "fit",
    )


def predicted(run: Run, adjusted: Any = lambda machine: machine) -> float:
    """In the unit of the run."""
    seconds = step_seconds(run, adjusted)
    if run.unit == "seconds":
        return seconds
    examples = run.setup.global_batch / run.setup.world_size / seconds  # per GPU
    return examples * (run.network.time if run.unit == "tokens" else flops(run) / 1e12)


def step_seconds(run: Run, adjusted: Any = lambda machine: machine) -> float:
    from hpc.jobs.hardware import machine_from_cluster
    from hpc.plan.step_time import predict_step

    return predict_step(run.network.trace(), run.setup, adjusted(machine_from_cluster(run.gpu, run.node_gbs))).seconds


def days(run: Run) -> float:
    """For 300 billion tokens."""
    return 300e9 / (run.setup.global_batch * run.network.time) * step_seconds(run) / 86400


def flops(run: Run) -> float:
    """Of an example, over all GPUs that share it, as the source counts them."""
    parts = run.network.trace().parts
    counted = ((run.counts if part.name == "block" else 3, work) for part in parts for work in part.forward)
    return run.setup.tensor_parallel * sum(times * work.count * work.flops.at(1) for times, work in counted)


def speed(run: Run, value: float) -> float:
    """More is faster, whatever the unit."""
    return 1 / value if run.unit == "seconds" else value


def error(run: Run, value: float) -> float:
    """By how much of the measured speed the predicted one is wrong."""
    return speed(run, value) / run.speed - 1


def judged(told: dict[Run, float], took: dict[Run, float]) -> list[dict[str, Any]]:
    """The rows of results.json: average errors in percent, and how many pairs of runs are in the right order."""
    late = [took[run] / run.days - 1 for run in took]
    paper = [run for run in told if run.table in PAPER]
    held = [run for run in told if not run.fitted]
    return [
        row("plan: error of step times, arXiv 2104.04473 table 2", [_off(paper, told)], "%", 15),
        row("plan: largest error of that table", [100 * max(abs(error(run, told[run])) for run in paper)], "%"),
        row("plan: error of days for 300 billion tokens", [_mean(late)], "%", 15),
        row("plan: error of step times, published runs not fitted to", [_off(held, told)], "%", 15),
        row("plan: published runs not fitted to", [len(held)], "", 30, "higher"),
        row("plan: of ZeRO-3 and PTD-P on equal GPUs, the faster one is told", [strategies(told)], "%", 100, "higher"),
        row("plan: pairs of runs of a table in the right order (Kendall)", [ranked(held, told)], "", 0.8, "higher"),
    ]


def strategies(told: dict[Run, float]) -> float:
    """Percent of the pairs of the paper's rows, of one network on as many GPUs, whose faster strategy is told."""
    zero, pipelined = ([run for run in told if run.table == name] for name in PAPER)
    pairs = [(a, b) for a in zero for b in pipelined if a.network.layers == b.network.layers]
    pairs = [(a, b) for a, b in pairs if a.setup.world_size == b.setup.world_size]
    right = sum((a.measured < b.measured) == (told[a] < told[b]) for a, b in pairs)
    return 100 * right / len(pairs)


def ranked(chosen: Sequence[Run], told: dict[Run, float]) -> float:
    """Kendall's rank correlation over pairs of a table whose measured speeds differ."""
    pairs = [(a, b) for a, b in combinations(chosen, 2) if a.table == b.table and a.speed != b.speed]
    agree = sum((a.speed < b.speed) == (speed(a, told[a]) < speed(b, told[b])) for a, b in pairs)
    return 2 * agree / len(pairs) - 1


def _off(chosen: Sequence[Run], told: dict[Run, float]) -> float:
    return _mean(error(run, told[run]) for run in chosen)


def _mean(errors: Iterable[float]) -> float:
    return 100 * statistics.mean(map(abs, errors))


if __name__ == "__main__":
    main()
