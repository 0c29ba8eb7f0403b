"""The planner's step times against published ones: python benchmarks/published.py [--out results.json] [--fit]"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
PAPER = "arXiv 2104.04473, table 2"


@dataclass(frozen=True)
class Row:
    """A published run: what is known of it, and what was measured."""

    table: str
    source: str
    name: str
    network: Any  # decoder.Decoder
    setup: Any
    machine: tuple[str, float]  # GPU, GB/s of a node
    unit: str
    counts: int
    measured: float
    fit: bool


def rows() -> Iterator[Row]:
    """What published.yaml holds."""
    known = yaml.safe_load((HERE / "published.yaml").read_text(encoding="utf-8"))
    for table in known["tables"]:
        for values in table["rows"]:
            yield _row(table, values, known["networks"])


def _row(table: dict[str, Any], values: Sequence[Any], networks: dict[str, Any]) -> Row:
    from decoder import Decoder
    from my_research.hpc.setup import Setup

    columns = table["columns"]
    cells = table["run"] | table["how"] | dict(zip(columns, values, strict=False))
    how, run = ({field.name for field in fields(one)} & set(cells) for one in (Decoder, Setup))
    sizes = networks[cells["network"]] | {key: cells[key] for key in how}
    setup = Setup(devices=table["devices"], **{key: cells[key] for key in run})
    return Row(
        table["name"], table["source"], f"{cells['network']}, {setup.world_size} GPUs", Decoder(**sizes), setup,
        (table["gpu"], table["node_gbs"]), table["unit"], table.get("counts", 3), cells["measured"],
        len(values) > len(columns),
    )  # fmt: skip


def predicted(row: Row, adjust: Any = lambda machine: machine) -> float:
    """In the unit of the row."""
    from my_research.hpc.hardware import machine
    from my_research.hpc.steptime import step

    trace = row.network.trace()
    seconds = step(trace, row.setup, adjust(machine(*row.machine))).seconds
    if row.unit == "seconds":
        return seconds
    examples = row.setup.global_batch / row.setup.world_size / seconds  # per GPU
    return examples * (trace.tokens if row.unit == "tokens" else flops(row, trace) / 1e12)


def flops(row: Row, trace: Any) -> float:
    """Of an example over all GPUs that share it, as the source counts them."""
    blocks = set(map(id, trace.blocks))
    counted = ((row.counts if id(part) in blocks else 3, work) for part in trace.parts for work in part.forward)
    return row.setup.tensor_parallel * sum(times * work.count * work.flops.at(1) for times, work in counted)


def speed(row: Row, value: float) -> float:
    """More is faster, whatever the unit."""
    return 1 / value if row.unit == "seconds" else value


def error(row: Row, value: float) -> float:
    """By how much of the measured speed the predicted one is wrong."""
    return speed(row, value) / speed(row, row.measured) - 1
