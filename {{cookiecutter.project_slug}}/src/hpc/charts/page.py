"""HTML pages in one file that loads nothing: for phone and desk, light and dark. plotly.js in them draws the charts."""

import json
import os
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path

from hpc.charts.chart import Chart, describe, make_figure

HERE = Path(__file__).parent


def write_page(charts: Sequence[Chart], path: Path, *, title: str) -> None:
    """Write a page of charts below each other. Raises `OSError`."""
    figures = "".join(map(render_figure, charts))
    body = f'<h1>{escape_text(title)}</h1>\n<div class="charts wide">{figures}</div>\n'
    path.write_bytes(render_page(title, body))


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
    opening, between = f'<script nonce="{nonce}">'.encode(), b"</script>\n"
    draw = (HERE / "page.js").read_bytes()
    parts = [opening, read_plotly_js(), between, opening, draw, between, b"</body>\n</html>\n"]
    return b"".join([page.encode(errors="replace"), *parts])


def render_figure(chart: Chart) -> str:
    """Return a chart as HTML: in words, which page.js replaces by the figure, and its data.

    The data are no script: the browser does not execute them, and page.js only parses them.
    """
    figure = json.dumps(make_figure(chart), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    data = f'<script type="application/json">{figure}</script>'
    return f"<figure><div>{escape_text(describe(chart))}</div>{data}</figure>\n"


def escape_text(text: str) -> str:
    """Escape a text for HTML, and drop characters that cannot be printed or change the direction of others."""
    return escape("".join(char if char.isprintable() or char == "\n" else " " for char in text))


def read_plotly_js() -> bytes:
    """Return plotly.js. Its place is asked for, because `import plotly` would take longer than all the rest."""
    package = find_spec("plotly")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'plotly'", name="plotly")
    return (Path(package.origin).parent / "package_data" / "plotly.min.js").read_bytes()
