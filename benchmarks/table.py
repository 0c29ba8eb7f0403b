"""The rows of results.json that have a goal, as a table and as a picture: python benchmarks/table.py results.json

With --readme FILE the table takes the place of what stands there between the marks <!-- figures -->.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MARKS = re.compile(r"(?s)(<!-- figures -->\n).*(<!-- /figures -->)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--readme", type=Path)
    parser.add_argument("--plot", type=Path, help="a PNG file")
    asked = parser.parse_args()
    rows = [row for row in json.loads(asked.results.read_text(encoding="utf-8")) if row["goal"] is not None]
    written = table(rows)
    print(written)
    if asked.readme:
        text = asked.readme.read_text(encoding="utf-8")
        asked.readme.write_text(MARKS.sub(lambda found: found[1] + written + found[2], text), encoding="utf-8")
    if asked.plot:
        draw(rows, asked.plot)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each row, and under it on which machines and days they were measured."""
    lines = ["| what | measured | middle half | goal | |", "|---|---:|---:|---:|---|"]
    for row in rows:
        sign = "≤" if row["better"] == "lower" else "≥"
        low, _, high = row["spread"].partition(" to ")
        spread = f"{low}–{high}" if low != high else ""
        unit = f" {row['unit']}" if row["unit"] else ""
        figures = f"{row['value']:.4g}{unit} | {spread} | {sign} {row['goal']:g}{unit}"
        lines.append(f"| {row['name']} | {figures} | {'' if reached(row) else 'missed'} |")
    where = sorted({f"{row['machine']}, {row['date']}" for row in rows})
    return "\n".join([*lines, "", f"Measured on {'; '.join(where)}.", ""])


def reached(row: dict[str, Any]) -> bool:
    return row["value"] <= row["goal"] if row["better"] == "lower" else row["value"] >= row["goal"]


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """How much of its goal each figure takes: shorter is better, the line is the goal."""
    from matplotlib import pyplot

    shown = [row for row in rows if row["goal"] and row["value"]][::-1]
    shares = [
        row["value"] / row["goal"] if row["better"] == "lower" else row["goal"] / row["value"] for row in shown
    ]  # fmt: skip
    figure, axes = pyplot.subplots(figsize=(9, 0.4 * len(shown) + 1), layout="constrained")
    axes.barh([row["name"] for row in shown], shares, color=["C0" if reached(row) else "C3" for row in shown])
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("share of the goal; left of the line it is reached")
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
