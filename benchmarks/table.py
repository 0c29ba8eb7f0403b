"""The rows of results.json as tables and a picture: python benchmarks/table.py results.json [--plot FILE]

With --readme FILE the tables take the place of what stands there between the marks <!-- figures -->.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORTH = ": step with it over without"  # how the names of these rows end
MARKS = re.compile(r"(?s)(<!-- figures -->\n).*(<!-- /figures -->)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--readme", type=Path)
    parser.add_argument("--plot", type=Path, help="a PNG file")
    asked = parser.parse_args()
    rows = json.loads(asked.results.read_text(encoding="utf-8"))
    written = tables(rows)
    print(written)
    if asked.readme:
        text = asked.readme.read_text(encoding="utf-8")
        asked.readme.write_text(MARKS.sub(lambda found: found[1] + written + found[2], text), encoding="utf-8")
    if asked.plot:
        draw(rows, asked.plot)


def tables(rows: Sequence[dict[str, Any]]) -> str:
    return goals([row for row in rows if row["goal"] is not None]) + "\n" + defaults(rows)


def goals(rows: Sequence[dict[str, Any]]) -> str:
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


def defaults(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: what each fast default is worth, a step with it over one without."""
    lines = ["| default | step with it over without | middle half |", "|---|---:|---:|"]
    for row in rows:
        if row["name"].endswith(WORTH):
            name = row["name"].removesuffix(WORTH)
            lines.append(f"| {name} | {row['value']:.3g} | {row['spread'].replace(' to ', '–')} |")
    return "\n".join([*lines, ""])


def reached(row: dict[str, Any]) -> bool:
    return row["value"] <= row["goal"] if row["better"] == "lower" else row["value"] >= row["goal"]


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """How much of its goal each figure takes, and what is behind some of them."""
    from matplotlib import pyplot

    with_goal = [row for row in rows if row["goal"] and row["value"]]
    panels = [
        (
            [(row["name"], share(row), reached(row)) for row in with_goal],
            "share of the goal; left of the line: reached",
        ),
        (named(rows, "CPU time of a step: "), "CPU time of a step of a tiny network, µs"),
        (named(rows, "photos of 224 x 224, "), "photos per second"),
    ]
    heights = [len(bars) + 2 for bars, _ in panels]
    figure, axes = pyplot.subplots(
        len(panels), figsize=(10, 0.3 * sum(heights)), height_ratios=heights, layout="constrained"
    )  # fmt: skip
    for (bars, label), one in zip(panels, axes, strict=True):
        names, values, good = zip(*bars, strict=True)
        one.barh(names, values, color=["C0" if is_good else "C3" for is_good in good])
        one.invert_yaxis()
        one.set_xlabel(label)
        one.set_xscale("log" if max(values) > 100 * min(values) else "linear")
    axes[0].axvline(1, color="black", linewidth=1)
    figure.savefig(file, dpi=100)


def named(rows: Sequence[dict[str, Any]], start: str) -> list[tuple[str, float, bool]]:
    return [(row["name"].removeprefix(start), row["value"], True) for row in rows if row["name"].startswith(start)]


def share(row: dict[str, Any]) -> float:
    return row["value"] / row["goal"] if row["better"] == "lower" else row["goal"] / row["value"]


if __name__ == "__main__":
    main()
