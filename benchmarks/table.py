"""Show the rows of results.json as tables and a picture: python benchmarks/table.py results.json [--plot FILE]

With --readme FILE the tables replace the text between the marks <!-- figures --> in that file.
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
    arguments = parser.parse_args()
    rows = json.loads(arguments.results.read_text(encoding="utf-8"))
    text = make_tables(rows)
    print(text)
    if arguments.readme:
        readme = arguments.readme.read_text(encoding="utf-8")
        new_readme = MARKS.sub(lambda match: match[1] + text + match[2], readme)
        arguments.readme.write_text(new_readme, encoding="utf-8")
    if arguments.plot:
        draw_picture(rows, arguments.plot)


def make_tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return the two tables of the README as Markdown."""
    return goals_table([row for row in rows if row["goal"] is not None]) + "\n" + defaults_table(rows)


def goals_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line for each row and, below the table, on which machines and days they were measured."""
    lines = ["| what | measured | middle half | goal | |", "|---|---:|---:|---:|---|"]
    for row in rows:
        sign = "≤" if row["better"] == "lower" else "≥"
        low, _, high = row["spread"].partition(" to ")
        spread = f"{low}–{high}" if low != high else ""
        unit = f" {row['unit']}" if row["unit"] else ""
        figures = f"{row['value']:.4g}{unit} | {spread} | {sign} {row['goal']:g}{unit}"
        lines.append(f"| {row['name']} | {figures} | {'' if is_goal_reached(row) else 'missed'} |")
    measured_on = sorted({f"{row['machine']}, {row['date']}" for row in rows})
    return "\n".join([*lines, "", f"Measured on {'; '.join(measured_on)}.", ""])


def defaults_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the gain of each fast default: a step with it over one without."""
    lines = ["| default | step with it over without | middle half |", "|---|---:|---:|"]
    for row in rows:
        if row["name"].endswith(WORTH):
            name = row["name"].removesuffix(WORTH)
            lines.append(f"| {name} | {row['value']:.3g} | {row['spread'].replace(' to ', '–')} |")
    return "\n".join([*lines, ""])


def is_goal_reached(row: dict[str, Any]) -> bool:
    return row["value"] <= row["goal"] if row["better"] == "lower" else row["value"] >= row["goal"]


def draw_picture(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw how much of its goal each figure uses, and the figures behind some of them."""
    from matplotlib import pyplot

    with_goal = [row for row in rows if row["goal"] and row["value"]]
    panels = [
        (
            [(row["name"], share_of_goal(row), is_goal_reached(row)) for row in with_goal],
            "share of the goal; left of the line: reached",
        ),
        (rows_with_prefix(rows, "CPU time of a step: "), "CPU time of a step of a tiny network, µs"),
        (rows_with_prefix(rows, "photos of 224 x 224, "), "photos per second"),
    ]
    heights = [len(bars) + 2 for bars, _ in panels]
    figure, axes = pyplot.subplots(
        len(panels), figsize=(10, 0.3 * sum(heights)), height_ratios=heights, layout="constrained"
    )  # fmt: skip
    for (bars, label), axis in zip(panels, axes, strict=True):
        names, values, goals_reached = zip(*bars, strict=True)
        axis.barh(names, values, color=["C0" if is_reached else "C3" for is_reached in goals_reached])
        axis.invert_yaxis()
        axis.set_xlabel(label)
        axis.set_xscale("log" if max(values) > 100 * min(values) else "linear")
    axes[0].axvline(1, color="black", linewidth=1)
    figure.savefig(file, dpi=100)


def rows_with_prefix(rows: Sequence[dict[str, Any]], prefix: str) -> list[tuple[str, float, bool]]:
    """Return (rest of the name, value, True) of the rows whose name has this prefix."""
    return [(row["name"].removeprefix(prefix), row["value"], True) for row in rows if row["name"].startswith(prefix)]


def share_of_goal(row: dict[str, Any]) -> float:
    return row["value"] / row["goal"] if row["better"] == "lower" else row["goal"] / row["value"]


if __name__ == "__main__":
    main()
