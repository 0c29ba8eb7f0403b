"""HTML pages that are one file and load no other, for phone and desktop, light and dark. plotly.js draws the charts."""

import json
import os
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path

from hpc.charts.chart import Chart, describe, make_figure

HERE = Path(__file__).parent


def render_charts(charts: Sequence[Chart], title: str) -> bytes:
    """Return a page of charts below each other."""
    figures = "".join(map(render_figure, charts))
    return render_page(title, f'<h1>{escape_text(title)}</h1>\n<div class="charts wide">{figures}</div>\n')


def render_page(title: str, body: str) -> bytes:
    """Return a page in UTF-8, whose scripts are plotly.js and page.js alone.

    Args:
        title: any text.
        body: HTML, in which other text is escaped.
    """
    nonce = os.urandom(16).hex()  # no other script can know it, so none is executed
    policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:"
    page = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape_text(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<link rel="icon" href="data:,">\n'
        f"<style>\n{(HERE / 'page.css').read_text(encoding='utf-8')}</style>\n</head>\n<body>\n<main>\n{body}</main>\n"
    )
    if "<figure" not in body:
        return f"{page}</body>\n</html>\n".encode(errors="replace")
    opening, closing = f'<script nonce="{nonce}">'.encode(), b"</script>\n"
    page_js = (HERE / "page.js").read_bytes()
    parts = [opening, read_plotly_js(), closing, opening, page_js, closing, b"</body>\n</html>\n"]
    return b"".join([page.encode(errors="replace"), *parts])


def render_figure(chart: Chart) -> str:
    """Return a chart as HTML: a description, which page.js replaces by the figure, and the data as JSON.

    The browser executes no JSON, and page.js only parses it.
    """
    figure = json.dumps(make_figure(chart), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    data = f'<script type="application/json">{figure}</script>'
    return f"<figure><div>{escape_text(describe(chart))}</div>{data}</figure>\n"


def escape_text(text: str) -> str:
    """Escape a text for HTML. Characters that do not print, or that change the direction of text, become spaces."""
    return escape("".join(char if char.isprintable() or char == "\n" else " " for char in text))


def read_plotly_js() -> bytes:
    """Return plotly.js from the package plotly, which is not imported: that would take longer than all the rest."""
    package = find_spec("plotly")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'plotly'", name="plotly")
    return (Path(package.origin).parent / "package_data" / "plotly.min.js").read_bytes()
