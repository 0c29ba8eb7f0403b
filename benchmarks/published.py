"""Compare planned step times with published ones: python benchmarks/published.py [--out results.json]"""

import argparse
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml
from result_rows import make_row, print_and_save

HERE = Path(__file__).resolve().parent
PAPER = ("ZeRO-3", "PTD-P")  # tables of published.yaml that are table 2 of arXiv 2104.04473


@dataclass(frozen=True)
class PublishedRun:
    """A published run: its settings, and what was measured."""

    table: str
    name: str
    network: Any  # decoder.Decoder
    setup: Any  # hpc.plan.setup.ParallelLayout, on the nodes of one stage
    stages: Any  # pipelines.Pipeline
    world_size: int  # of all stages
    gpu: str
    node_gbs: float
    unit: str
    forward_passes: int  # how many times the forward pass of a block is in its FLOPs
    measured: float
    days: float | None  # for 300 billion tokens
    is_fitted: bool

    @property
    def speed(self) -> float:
        return to_speed(self, self.measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file of results, which is updated")
    arguments = parser.parse_args()
    with baked_project():
        predictions = {run: predict(run) for run in read_runs()}
        days = {run: predict_days(run) for run in predictions if run.days}
    for run, value in predictions.items():
        comparison = f"{value:9.4g} for {run.measured:<9.4g} {run.unit:8} {relative_error(run, value):+6.1%}"
        mark = " fitted" if run.is_fitted else ""
        if run.days:
            mark += f" {days[run]:.0f} for {run.days} days"
        print(f"{run.table:48} {run.name:44} {comparison} {mark}")
    print_and_save(make_rows(predictions, days), arguments.out)


@contextmanager
def baked_project() -> Iterator[None]:
    """Bake a project, and use it within the block."""
    from bench_project import make_project, use_project

    with tempfile.TemporaryDirectory() as folder:
        use_project(make_project(Path(folder)))
        yield


def read_runs() -> Iterator[PublishedRun]:
    """Yield the runs of published.yaml."""
    content = yaml.safe_load((HERE / "published.yaml").read_text(encoding="utf-8"))
    for table in content["tables"]:
        for values in table["rows"]:
            yield _make_run(table, values, networks=content["networks"])


def _make_run(table: dict[str, Any], values: Sequence[Any], *, networks: dict[str, Any]) -> PublishedRun:
    from decoder import Decoder
    from pipelines import Pipeline

    from hpc.plan.setup import ParallelLayout

    cells = table["run"] | table["how"] | dict(zip(table["columns"], values, strict=False))
    decoder_keys, setup_keys, stage_keys = (
        {field.name for field in fields(kind)} & set(cells) for kind in (Decoder, ParallelLayout, Pipeline)
    )
    network = Decoder(**networks[cells["network"]] | {key: cells[key] for key in decoder_keys})
    stages = Pipeline(**{key: cells[key] for key in stage_keys})
    nodes_of_stage, rest = divmod(cells["nodes"], stages.pipeline)
    assert rest == 0, table["name"]
    setup = ParallelLayout(
        devices=table["devices"], **{key: cells[key] for key in setup_keys} | {"nodes": nodes_of_stage}
    )
    world_size = setup.world_size * stages.pipeline
    varied = [f"{key} {cells[key]}" for key in table["columns"] if key in ("time", "micro_batch", "pipeline")]
    return PublishedRun(
        table=table["name"],
        name=", ".join([cells["network"], f"{world_size} GPUs", *varied]),
        network=network,
        setup=setup,
        stages=stages,
        world_size=world_size,
        gpu=table["gpu"],
        node_gbs=table["node_gbs"],
        unit=table["unit"],
        forward_passes=table.get("counts", 3),
        measured=cells["measured"],
        days=cells.get("days"),
        is_fitted=values[-1] == "fit",
    )


def predict(run: PublishedRun, adjust: Any = lambda machine: machine) -> float:
    """Return the prediction in the unit of the run.

    Args:
        adjust: changes the machine of the prediction.
    """
    seconds = predict_step_seconds(run, adjust)
    if run.unit == "seconds":
        return seconds
    examples_per_second = run.setup.global_batch / run.world_size / seconds  # per GPU
    return examples_per_second * (run.network.time if run.unit == "tokens" else example_flops(run) / 1e12)


def predict_step_seconds(run: PublishedRun, adjust: Any = lambda machine: machine) -> float:
    from hpc.jobs.hardware import machine_from_cluster

    machine = adjust(machine_from_cluster(run.gpu, run.node_gbs))
    trace = run.network.trace(checkpointing=run.setup.checkpointing)
    output_bytes = run.network.output_bytes * run.setup.micro_batch
    return run.stages.step_seconds(trace, run.setup, machine, output_bytes=output_bytes)


def predict_days(run: PublishedRun) -> float:
    """Return the predicted days for 300 billion tokens."""
    return 300e9 / (run.setup.global_batch * run.network.time) * predict_step_seconds(run) / 86400


def example_flops(run: PublishedRun) -> float:
    """Return the FLOPs of an example on all GPUs that share it, as the source counts them."""
    parts = run.network.parts()
    counted = ((run.forward_passes if part.is_block else 3, work) for part in parts for work in part.forward)
    return run.setup.tensor_parallel * sum(times * work.count * work.flops.at(1) for times, work in counted)


def to_speed(run: PublishedRun, value: float) -> float:
    """Return a value in the run's unit as a speed: larger is faster, whatever the unit."""
    return 1 / value if run.unit == "seconds" else value


def relative_error(run: PublishedRun, value: float) -> float:
    """Return the error of a predicted value, as a share of the measured speed."""
    return to_speed(run, value) / run.speed - 1


def make_rows(predictions: dict[PublishedRun, float], days: dict[PublishedRun, float]) -> list[dict[str, Any]]:
    """Return the rows of results.json: mean errors in percent, and how many pairs of runs are in the right order.

    Args:
        predictions: in the unit of each run.
        days: predicted for 300 billion tokens, of the runs that have a published number.
    """
    errors_of_days = [predicted / run.days - 1 for run, predicted in days.items() if run.days]
    paper = [run for run in predictions if run.table in PAPER]
    held_out = [run for run in predictions if not run.is_fitted]
    largest_error = max(abs(relative_error(run, predictions[run])) for run in paper)
    return [
        make_row("plan: error of step times, arXiv 2104.04473 table 2", [_mean_error(paper, predictions)], "%", 15),
        make_row(
            "plan: largest error of that table",
            [100 * largest_error],
            "%",
        ),
        make_row("plan: error of days for 300 billion tokens", [_mean_percent(errors_of_days)], "%", 15),
        make_row(
            "plan: error of step times, published runs not fitted to", [_mean_error(held_out, predictions)], "%", 15
        ),
        make_row("plan: published runs not fitted to", [len(held_out)], "", 30, "higher"),
        make_row(
            "plan: of ZeRO-3 and PTD-P on equal GPUs, the faster one is told",
            [right_strategies_percent(predictions)],
            "%",
            100,
            "higher",
        ),
        make_row(
            "plan: pairs of runs of a table in the right order (Kendall)",
            [rank_correlation(held_out, predictions)],
            "",
            0.8,
            "higher",
        ),
    ]


def right_strategies_percent(predictions: dict[PublishedRun, float]) -> float:
    """Return for how many pairs of the paper's rows, with equal network and GPUs, the right strategy is faster."""
    zero, pipelined = ([run for run in predictions if run.table == name] for name in PAPER)
    pairs = [(a, b) for a in zero for b in pipelined if a.network.layers == b.network.layers]
    pairs = [(a, b) for a, b in pairs if a.world_size == b.world_size]
    num_right = sum((a.measured < b.measured) == (predictions[a] < predictions[b]) for a, b in pairs)
    return 100 * num_right / len(pairs)


def rank_correlation(runs: Sequence[PublishedRun], predictions: dict[PublishedRun, float]) -> float:
    """Return Kendall's rank correlation over pairs of a table whose measured speeds differ."""
    pairs = [(a, b) for a, b in combinations(runs, 2) if a.table == b.table and a.speed != b.speed]
    num_right = sum(
        (a.speed < b.speed) == (to_speed(a, predictions[a]) < to_speed(b, predictions[b])) for a, b in pairs
    )
    return 2 * num_right / len(pairs) - 1


def _mean_error(runs: Sequence[PublishedRun], predictions: dict[PublishedRun, float]) -> float:
    return _mean_percent(relative_error(run, predictions[run]) for run in runs)


def _mean_percent(errors: Iterable[float]) -> float:
    return 100 * statistics.mean(map(abs, errors))


if __name__ == "__main__":
    main()
