"""Check the figures of charts, and that nothing in them is lost or executed."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fork import PROJECT
from plotly import graph_objects
from plotly.offline import get_plotlyjs

from hpc.charts import chart, page
from hpc.charts.chart import Band, Chart, Series
from hpc.charts.units import format_energy, format_si

LINE = Series("loss", [(0, 4.0), (50, 2.0), (100, 1.0)])
EVIL = "</script><script>alert('x')</script><!--<b>&\x00\x1b[31m\u202e\u2028"


def trace(plot: Chart) -> dict[str, Any]:
    (only,) = chart.make_figure(plot)["data"]
    return only


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (3e-4, "0.0003"), (1.5e-6, "1.5e-06"), (12.345, "12.3"), (-9876, "-9.88 k"), (12345, "12.3 k"),
     (999.4, "999"), (999.7, "1 k"),
     (4.56e9, "4.56 G"), (1e32, "1e+32"), (math.inf, "inf"), (math.nan, "nan")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_si(value) == text


@pytest.mark.parametrize(
    ("watt_hours", "text"),
    [
        (0, "0 Wh"),
        (999.4, "999 Wh"),
        (999.6, "1 kWh"),
        (123_400, "123 kWh"),
        (999_600, "1 MWh"),
        (1_234_000, "1.23 MWh"),
    ],
)
def test_energies_have_no_exponent(watt_hours: float, text: str) -> None:
    assert format_energy(3600 * watt_hours) == text


def test_nan_leaves_a_gap_and_so_does_0_on_a_log_axis() -> None:
    points = [(0, 1.0), (1, 2.0), (2, math.nan), (3, 3.0), (4, math.inf), (5, 0.0), (6, 1e99)]
    assert trace(Chart("", "", "", [Series("a", points)]))["y"] == [1.0, 2.0, None, 3.0, None, 0.0, None]
    assert trace(Chart("", "", "", [Series("a", points)], log_y=True))["y"] == [1.0, 2.0, None, 3.0, None, None, None]
    assert trace(Chart("", "", "", [Series("a", points)], log_x=True))["x"] == [1, 2, 3, 4, 5, 6]


def test_a_long_curve_is_thinned_and_keeps_its_spikes_and_gaps() -> None:
    points = [(float(x), 1.0) for x in range(100_000)]
    points[77_777], points[5_000] = (77_777.0, 9.0), (5_000.0, math.nan)
    thinned = chart.thin_points(points, 900)
    assert len(thinned) <= 903
    assert (77_777.0, 9.0) in thinned and [x for x, y in thinned if y != y] == [5_000.0]
    assert [x for x, _ in thinned] == sorted(x for x, _ in thinned)
    assert chart.thin_points(points[:100], 900) == points[:100]
    assert len(trace(Chart("", "", "", [Series("a", points)]))["x"]) < 3100


def test_a_single_point_is_visible() -> None:
    assert "markers" in trace(Chart("Loss", "step", "loss", [Series("a", [(0, 1.0)])]))["mode"]


def test_series_of_a_name_share_a_colour_and_an_entry_of_the_legend() -> None:
    again, ideal = Series("loss", LINE.points), Series("ideal", LINE.points, "dashes")
    figure = chart.make_figure(Chart("Loss", "step", "loss", [LINE, again, ideal]))
    assert [one["line"]["color"] for one in figure["data"]] == ["--series-1", "--series-1", "--series-2"]
    assert [one["showlegend"] for one in figure["data"]] == [True, False, True]
    assert [one["line"]["dash"] for one in figure["data"]] == ["solid", "solid", "dash"]


def test_bands_are_one_shape_for_each_name() -> None:
    bands = [Band("start", -100, 0), Band("checkpoint", 50, 50.001), Band("checkpoint", 60, 61)]
    layout = chart.make_figure(Chart("Loss", "step", "loss", [LINE], [*bands, Band("x", math.inf, math.nan)]))["layout"]
    shapes = {shape["name"]: shape for shape in layout["shapes"]}
    assert shapes["start"]["path"] == "M-100,0V1H0V0Z"
    assert shapes["checkpoint"]["path"] == "M50,0V1H50.001V0ZM60,0V1H61V0Z"
    assert "inf" not in shapes["x"]["path"] and "nan" not in shapes["x"]["path"]
    assert shapes["checkpoint"]["line"]["width"] == 1, "a short one is visible"
    assert layout["showlegend"]


def test_axes() -> None:
    axis = chart.make_figure(Chart("", "x", "%", [LINE], from_zero=True))["layout"]["yaxis"]
    assert axis == {"rangemode": "tozero", "exponentformat": "SI"}
    nodes = Series("rate", [(2**power, 1e-3) for power in range(11)])
    layout = chart.make_figure(Chart("", "nodes", "", [nodes], log_x=True, log_y=True))["layout"]
    assert layout["xaxis"]["type"] == "log" and layout["xaxis"]["tickvals"] == [1, 4, 16, 64, 256, 1024]
    assert layout["yaxis"]["type"] == "log" and layout["yaxis"]["exponentformat"] == "e"


def test_plotly_knows_all_keys_of_a_figure() -> None:
    bands = [Band("start", 1, 2)]
    for series in (LINE, Series("dashes", LINE.points, "dashes")):
        figure = chart.make_figure(Chart("a", "b", "c", [series], bands, log_x=True, log_y=True))
        text = re.sub(r'"--[\w-]+"', '"#123456"', json.dumps(figure))
        graph_objects.Figure(json.loads(text))  # raises ValueError for a key that there is not


def test_a_chart_is_described_in_words() -> None:
    assert chart.describe(Chart("Loss", "step", "nats", [LINE])) == (
        "Loss: nats over step. loss from 4 to 1, at least 1, at most 4"
    )
    nothing = Chart("Loss", "step", "nats", [Series("loss", [(0, math.nan)])])
    assert "NaN or infinite from step 0 on" in chart.describe(nothing)
    assert chart.make_figure(nothing)["layout"]["annotations"][0]["text"] == "no data"


# -- Pages --


def test_no_text_becomes_a_script(tmp_path: Path) -> None:
    evil = Chart(EVIL, EVIL, EVIL, [Series(EVIL, LINE.points), Series("b", [])], [Band(EVIL + "band", 0, 1)])
    (tmp_path / "page.html").write_bytes(page.render_charts([evil, evil], EVIL))
    text = (tmp_path / "page.html").read_text()
    assert text.count(page.read_plotly_js().decode()) == 1
    rest = text.replace(page.read_plotly_js().decode(), "")
    assert re.findall("<(script[^>]*)>", rest) == [
        *['script type="application/json"'] * 2, *[f'script nonce="{re.findall("nonce-([0-9a-f]{32})", rest)[0]}"'] * 2
    ]  # fmt: skip
    assert rest.count("</script>") == 4 and "<!--" not in rest and "<b>" not in rest
    assert not [char for char in rest if char in "\x00\x1b\u202e\u2028"]
    (data, _) = re.findall(r'<script type="application/json">(.*?)</script>', rest)
    shown = json.loads(data)["data"][0]["name"]
    assert "<" not in shown.replace("<br>", ""), "plotly.js takes tags for markup"
    assert "&lt;/script&gt;" in shown


def test_two_pages_have_different_nonces(tmp_path: Path) -> None:
    pages = [page.render_page("title", page.render_figure(Chart("", "", "", [LINE]))) for _ in range(2)]
    first, second = (re.findall(b"'nonce-([0-9a-f]{32})'", text) for text in pages)
    assert first != second
    assert b"Plotly" not in page.render_page("title", "<p>text</p>"), "it draws nothing"


def test_plotly_js_is_read_without_its_package() -> None:
    assert page.read_plotly_js().decode() == get_plotlyjs()
    code = "from hpc.charts import page; page.read_plotly_js(); import sys; sys.exit('plotly' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(PROJECT / "src")})
    assert done.returncode == 0
