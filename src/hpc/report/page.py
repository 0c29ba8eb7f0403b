"""The report of a run as one HTML page, in which everything from the run directory is escaped text."""

import re
from collections.abc import Sequence

from hpc.charts.page import escape_text, render_figure, render_page
from hpc.report.blocks import Block, Figures, Preformatted, Section, Table

MAX_FACT_LENGTH = 28  # characters; a longer fact gets a line of its own


def render_html(sections: Sequence[Section]) -> bytes:
    """Return the page in UTF-8. The title of the first section is the name of the run and its state."""
    name, _, state = escape_text(sections[0].title).partition(": ")
    header = f"<header>\n<h1>{name} <span>{state}</span></h1>\n{''.join(map(_block, sections[0].blocks))}</header>\n"
    return render_page(sections[0].title, header + "".join(map(_section, sections[1:])))


def _section(section: Section) -> str:
    return f"<section>\n<h2>{escape_text(section.title)}</h2>\n{''.join(map(_block, section.blocks))}</section>\n"


def _block(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{_with_code(block)}</p>\n"
    if isinstance(block, list):
        return f"<ul>{''.join(f'<li>{_with_code(sentence)}</li>' for sentence in block)}</ul>\n"
    if isinstance(block, dict):
        return f"<dl>{''.join(_fact(name, text) for name, text in block.items())}</dl>\n"
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Figures):
        figures = "".join(map(render_figure, block.charts))
        return f'<div class="charts{" wide" if block.wide else ""}">{figures}</div>\n'
    assert isinstance(block, Preformatted)
    text = f"<pre>{escape_text(block.text)}</pre>"
    if block.name:
        return f"<details><summary>{escape_text(block.name)}</summary>{text}</details>\n"
    return f'<div class="table" role="region" tabindex="0" aria-label="table">{text}</div>\n'


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
