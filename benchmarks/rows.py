"""The rows of results.json: what was measured, what it should be, how far it scattered."""

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


def row(name: str, values: Sequence[float], unit: str, goal: float | None = None, better: str = "lower") -> dict:
    """The median, and the quartiles as spread; of one value, which was counted, itself."""
    low, value, high = statistics.quantiles(values, n=4) if len(values) > 1 else (*values, *values, *values)
    spread = f"{low:.4g} to {high:.4g}"
    return {"name": name, "value": value, "unit": unit, "goal": goal, "better": better, "spread": spread}


def report(rows: Sequence[dict[str, Any]], out: Path | None) -> None:
    """Print the rows; in the file they take the place of older ones of the same names."""
    machine = where()
    for one in rows:
        one |= {"machine": machine, "date": f"{date.today()}"}
        goal = "" if one["goal"] is None else f"goal {one['goal']}"
        print(f"{one['name']:62} {one['value']:10.4g} {one['unit']:4} {goal:12} spread {one['spread']}")
    if out:
        older = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
        names = {one["name"] for one in rows}
        kept = [one for one in older if one["name"] not in names]
        out.write_text(json.dumps([*kept, *rows], indent=1) + "\n", encoding="utf-8")


def where() -> str:
    """Cores and kind of the processor, and the GPU where torch is in use and sees one."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    torch: Any = sys.modules.get("torch")
    gpu = f", {torch.cuda.get_device_name()}" if torch and torch.cuda.is_available() else ""
    return f"{os.cpu_count()} cores of {found[1] if found else platform.machine()}{gpu}"
