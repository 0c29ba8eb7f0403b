"""The report of a run as one HTML file that loads nothing and has no scripts, for phone and desk, light and dark."""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from hpc.charts.chart import Chart, render_svg
from hpc.report.blocks import Block, BulletList, Collapsed, Facts, Preformatted, Section, Table

NARROW, WIDE = (400, 270), (1120, 300)  # width and height of a chart in pixels
MAX_FACT_LENGTH = 28  # characters; a longer fact gets a line of its own


def render_html(sections: Sequence[Section]) -> str:
    """Return the page, in which everything from the run directory is escaped text."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    title = escape_text(sections[0].title)
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


def escape_text(text: str) -> str:
    """Escape a text for HTML, and drop characters that cannot be printed or change the direction of others."""
    return escape("".join(char if char.isprintable() or char == "\n" else " " for char in text))


def _section(section: Section) -> str:
    return f"<section>\n<h2>{escape_text(section.title)}</h2>\n{''.join(map(_block, section.blocks))}</section>\n"


def _block(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{_with_code(block)}</p>\n"
    if isinstance(block, Facts):
        return f"<dl>{''.join(_fact(name, text) for name, text in block.items)}</dl>\n"
    if isinstance(block, BulletList):
        return f"<ul>{''.join(f'<li>{_with_code(sentence)}</li>' for sentence in block.sentences)}</ul>\n"
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Preformatted):
        text = f"<pre>{escape_text(block.text)}</pre>"
        return f'<div class="table" role="region" tabindex="0" aria-label="table">{text}</div>\n'
    if isinstance(block, Collapsed):
        summary = f"<summary>{escape_text(block.name)}</summary>"
        return f"<details>{summary}<pre>{escape_text(block.text)}</pre></details>\n"
    figures = "".join(_figure(chart, block.wide) for chart in block.charts)
    return f'<div class="charts{" wide" if block.wide else ""}">{figures}</div>\n'


def _fact(name: str, text: str) -> str:
    style = ' class="whole"' if len(text) > MAX_FACT_LENGTH else ""
    return f"<div{style}><dt>{escape_text(name)}</dt><dd>{escape_text(text)}</dd></div>"


def _with_code(sentence: str) -> str:
    """Escape a sentence, and mark the text between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape_text(sentence))


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape_text(cell)}</th>' for cell in table.head)
    rows = "".join(map(_row, table.rows))
    name = escape_text(", ".join(filter(None, table.head)))
    html = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="table" role="region" tabindex="0" aria-label="table: {name}">{html}</div>\n'


def _row(row: Sequence[str]) -> str:
    cells = "".join(f"<td>{escape_text(cell)}</td>" for cell in row[1:])
    return f'<tr><th scope="row">{escape_text(row[0])}</th>{cells}</tr>'


def _figure(chart: Chart, wide: bool) -> str:
    """Return a figure. A wide chart is drawn in two sizes, of which the style shows the one that fits."""
    narrow = render_svg(chart, NARROW[0], height=NARROW[1])
    if not wide:
        return f"<figure>{narrow}</figure>"
    return f'<figure class="both">{narrow}{render_svg(chart, WIDE[0], height=WIDE[1])}</figure>'
