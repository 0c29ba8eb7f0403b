"""Check pages of hpc in a real browser: hostile names, and tables that are wider than a phone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Tab, browser

from hpc.charts.chart import Band, Chart, Series
from hpc.charts.page import render_charts
from hpc.report.blocks import Preformatted, Section
from hpc.report.page import render_html

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="not installed: chromium (apt install chromium)"),
]

PHONE, DESK = 400, 1280  # pixels


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


def test_what_a_run_is_called_is_no_script(tab: Tab, tmp_path: Path) -> None:
    evil = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 2'>"
    chart = Chart(evil, evil, evil, [Series(evil, [(0, 1.0), (1, 2.0)]), Series("b", [])], [Band(f"{evil}2", 0, 1)])
    (tmp_path / "evil.html").write_bytes(render_charts([chart], evil))
    tab.show((tmp_path / "evil.html").as_uri(), DESK)
    assert tab.evaluate("[window.evil, document.querySelectorAll('img').length]") == [None, 0]
    assert tab.evaluate("document.querySelector('.legendtext').textContent").startswith("</script><script>window.evil")
    assert tab.requests == [(tmp_path / "evil.html").as_uri()] and tab.complaints == []


def test_a_phone_scrolls_the_table_of_a_network_check_and_wraps_no_line(tab: Tab, tmp_path: Path) -> None:
    table = Preformatted("\n".join(["size | " + "time per step | " * 20] * 3))
    path = tmp_path / "table.html"
    path.write_bytes(render_html([Section("digits: finished"), Section("Network check", [table])]))
    for width in (DESK, PHONE):
        tab.show(path.as_uri(), width)
        height = tab.evaluate("document.querySelector('pre').clientHeight")
        line_height = tab.evaluate("parseFloat(getComputedStyle(document.querySelector('pre')).lineHeight)")
        assert height == pytest.approx(3 * line_height, abs=1)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
