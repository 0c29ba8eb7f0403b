"""The rows of results.json: the measured value, its goal, and its spread."""

import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any


def make_row(name: str, values: Sequence[float], unit: str, goal: float | None = None, better: str = "lower") -> dict:
    """Return a row with the median of the values, and their quartiles as spread; a single value is its own spread."""
    low, value, high = statistics.quantiles(values, n=4) if len(values) > 1 else (*values, *values, *values)
    spread = f"{low:.4g} to {high:.4g}"
    return {"name": name, "value": value, "unit": unit, "goal": goal, "better": better, "spread": spread}


def print_and_save(rows: Sequence[dict[str, Any]], out: Path | None) -> None:
    """Print the rows, and write them into the file, in the place of rows of the same names."""
    machine = describe_machine()
    for row in rows:
        row |= {"machine": machine, "date": f"{date.today()}"}
        goal = "" if row["goal"] is None else f"goal {row['goal']}"
        print(f"{row['name']:62} {row['value']:10.4g} {row['unit']:4} {goal:12} spread {row['spread']}")
    if out:
        older = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
        merged = {row["name"]: row for row in [*older, *rows]}  # each at its place, new ones at the end
        out.write_text(json.dumps([*merged.values()], indent=1) + "\n", encoding="utf-8")


def describe_machine() -> str:
    """Return the number of cores, the processor, and the GPU if torch is imported and sees one."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    torch: Any = sys.modules.get("torch")
    gpu = f", {torch.cuda.get_device_name()}" if torch and torch.cuda.is_available() else ""
    return f"{os.cpu_count()} cores of {model[1] if model else platform.machine()}{gpu}"
