"""Show the rows of results.json as tables and a picture: python benchmarks/table.py results.json [--plot FILE]

With --readme FILE the tables replace the text between the marks <!-- figures --> in that file.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # for browser.py

SIZE = 1000  # pixels, the width of the picture
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
    """Draw how much of its goal each figure uses, and the figures behind some of them, by the browser of the tests."""
    from browser import CHROMIUM, browser  # of tests/
    from plotly import graph_objects, subplots

    if not CHROMIUM:
        print(f"{file} stays as it is: there is no chromium")
        return
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
    figure = subplots.make_subplots(rows=len(panels), row_heights=heights, vertical_spacing=0.06)
    for row, (bars, label) in enumerate(panels, 1):
        names, values, goals_reached = zip(*bars, strict=True)
        colours = ["#0072b2" if is_reached else "#d55e00" for is_reached in goals_reached]
        figure.add_trace(graph_objects.Bar(x=values, y=names, orientation="h", marker_color=colours), row, 1)
        scale = {"type": "log", "dtick": 1} if max(values) > 100 * min(values) else {"type": "linear"}
        figure.update_xaxes(title_text=label, exponentformat="power", **scale, row=row, col=1)
    figure.add_vline(1, row=1, col=1)
    figure.update_yaxes(autorange="reversed", automargin=True, dtick=1)
    height = 26 * sum(heights)
    figure.update_layout(template="plotly_white", showlegend=False, margin={"l": 8, "r": 16, "t": 8, "b": 8})
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder, "profile")) as tab:
        page, size = Path(folder, "speed.html"), {"default_width": SIZE, "default_height": height}
        figure.write_html(page, config={"staticPlot": True}, **size)
        tab.show(page.as_uri(), SIZE + 16, height=height + 16)
        tab.screenshot(file)


def rows_with_prefix(rows: Sequence[dict[str, Any]], prefix: str) -> list[tuple[str, float, bool]]:
    """Return (rest of the name, value, True) of the rows whose name has this prefix."""
    return [(row["name"].removeprefix(prefix), row["value"], True) for row in rows if row["name"].startswith(prefix)]


def share_of_goal(row: dict[str, Any]) -> float:
    return row["value"] / row["goal"] if row["better"] == "lower" else row["goal"] / row["value"]


if __name__ == "__main__":
    main()
