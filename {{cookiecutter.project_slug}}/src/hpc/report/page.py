"""A run's story as one HTML file: no script, nothing from elsewhere, light and dark, for a phone and for a desk."""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from hpc.charts import chart
from hpc.charts.chart import Chart
from hpc.report.blocks import Block, Facts, Fold, Items, Plain, Section, Table

NARROW, WIDE = (400, 270), (1120, 300)  # pixels of a chart
LONG, WHOLE = 28, ' class="whole"'  # characters of a fact that gets a line of its own


def html(sections: Sequence[Section]) -> str:
    """The page. All that comes from a run directory is text in it."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    title = clean(sections[0].title)
    name, _, state = title.rpartition(": ")
    body = "".join(_section(section) for section in sections[1:])
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f'<link rel="icon" href="data:,">\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n'
        f"<header>\n<h1>{name} <span>{state}</span></h1>\n{''.join(map(_block, sections[0].blocks))}</header>\n"
        f"{body}</main>\n</body>\n</html>\n"
    )


def clean(text: str) -> str:
    """As text in HTML, without characters that are none, or that turn the direction of others."""
    return escape("".join(char if char.isprintable() or char == "\n" else " " for char in text))


def _section(section: Section) -> str:
    return f"<section>\n<h2>{clean(section.title)}</h2>\n{''.join(map(_block, section.blocks))}</section>\n"


def _block(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{_typed(block)}</p>\n"
    if isinstance(block, Facts):
        inside = "".join(
            f"<div{WHOLE if len(text) > LONG else ''}><dt>{clean(name)}</dt><dd>{clean(text)}</dd></div>"
            for name, text in block.items
        )
        return f"<dl>{inside}</dl>\n"
    if isinstance(block, Items):
        return f"<ul>{''.join(f'<li>{_typed(line)}</li>' for line in block.lines)}</ul>\n"
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Plain):
        return (
            f'<div class="table" role="region" tabindex="0" aria-label="table"><pre>{clean(block.text)}</pre></div>\n'
        )
    if isinstance(block, Fold):
        return f"<details><summary>{clean(block.name)}</summary><pre>{clean(block.text)}</pre></details>\n"
    figures = "".join(_figure(one, block.wide) for one in block.charts)
    return f'<div class="charts{" wide" if block.wide else ""}">{figures}</div>\n'


def _typed(line: str) -> str:
    """What stands between ` is typed."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", clean(line))


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{clean(cell)}</th>' for cell in table.head)
    rows = "".join(
        f'<tr><th scope="row">{clean(row[0])}</th>{"".join(f"<td>{clean(cell)}</td>" for cell in row[1:])}</tr>'
        for row in table.rows
    )
    name = clean(", ".join(filter(None, table.head)))
    inside = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="table" role="region" tabindex="0" aria-label="table: {name}">{inside}</div>\n'


def _figure(one: Chart, wide: bool) -> str:
    """A wide one in two sizes, of which the style shows that which fits."""
    small = chart.svg(one, *NARROW)
    return f"<figure>{small}</figure>" if not wide else f'<figure class="both">{small}{chart.svg(one, *WIDE)}</figure>'
