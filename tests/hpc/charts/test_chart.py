"""Check axes and points of charts, and that nothing in them is lost or executed."""

import math
import random
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from hpc.charts import chart
from hpc.charts.axis import format_number, make_axis
from hpc.charts.chart import Band, Chart, Series
from hpc.charts.drawing import Box, Line, Text

LINE = Series("loss", [(0, 4.0), (50, 2.0), (100, 1.0)])


def drawn(plot: Chart) -> tuple[list[Line], list[Box], list[Text]]:
    marks = chart.chart_marks(plot, 640, 300)
    return (
        [mark for mark in marks if isinstance(mark, Line)],
        [mark for mark in marks if isinstance(mark, Box)],
        [mark for mark in marks if isinstance(mark, Text)],
    )


def curve(plot: Chart, colour: str = "series-1") -> list[Line]:
    return [line for line in drawn(plot)[0] if line.colour == colour]


@pytest.mark.parametrize(
    ("values", "log", "names"),
    [
        ([0, 97], False, ["0", "20", "40", "60", "80", "100"]),
        ([1.02, 1.07], False, ["1.02", "1.03", "1.04", "1.05", "1.06", "1.07"]),
        ([3, 26_000], False, ["0", "5k", "10k", "15k", "20k", "25k", "30k"]),
        ([2.0, 9.0], False, ["0", "2", "4", "6", "8", "10"]),
        ([-2e-4, 3e-4], False, ["-0.0002", "-0.0001", "0", "0.0001", "0.0002", "0.0003"]),
        ([1, 2, 4, 8], True, ["1", "2", "4", "8"]),
        ([1024, 2**30], True, ["1024", "16Ki", "256Ki", "4Mi", "64Mi", "1Gi"]),
        ([0.002, 7], True, ["0.01", "0.1", "1", "10"]),
        ([300, 2100], True, ["200", "500", "1000", "2000", "5000"]),
    ],
)
def test_ticks_are_round_numbers(values: list[float], log: bool, names: list[str]) -> None:
    assert [name for _, name in make_axis(values, 6, log=log, to_ticks=True).ticks] == names


def test_every_axis_holds_its_values() -> None:
    chance = random.Random(1)
    for _ in range(500):
        log, to_ticks, most = chance.random() < 0.5, chance.random() < 0.5, chance.randint(2, 9)
        sizes = [10.0 ** chance.choice([0, 0, 3, -200, -29, 29]) for _ in range(chance.randint(0, 5))]
        values = [abs(size) if log else chance.uniform(-size, size) for size in sizes if size > 1e-100 or not log]
        axis = make_axis(values, most, log=log, to_ticks=to_ticks)
        assert all(-1e-6 <= axis.position(value) <= 1 + 1e-6 for value in values), (values, axis)
        assert all(-1e-6 <= axis.position(tick) <= 1 + 1e-6 for tick, _ in axis.ticks), (values, axis)
        assert len(axis.ticks) <= 2 * most + 2, (values, axis)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (3e-4, "0.0003"),
        (1.5e-6, "1.5e-6"),
        (12.345, "12.3"),
        (9876, "9876"),
        (12345, "12.3k"),
        (4.56e9, "4.56G"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_number(value) == text


def test_points_lie_where_the_axes_say() -> None:
    (line,) = curve(Chart("Loss", "step", "loss", [LINE]))
    (left, top), middle, (right, bottom) = line.points
    assert middle[0] == pytest.approx((left + right) / 2)
    assert (bottom - middle[1]) / (bottom - top) == pytest.approx(1 / 3)  # 2 is a third of the way from 1 to 4
    (line,) = curve(Chart("Loss", "step", "loss", [LINE], log_y=True))
    assert (line.points[2][1] - line.points[1][1]) == pytest.approx(line.points[1][1] - line.points[0][1])


def test_nan_leaves_a_gap_and_so_does_0_on_a_log_axis() -> None:
    points = [(0, 1.0), (1, 2.0), (2, math.nan), (3, 3.0), (4, math.inf), (5, 0.0), (6, 1.0), (7, 2.0)]
    assert [len(line.points) for line in curve(Chart("", "", "", [Series("a", points)]))] == [2, 2, 3]
    assert [len(line.points) for line in curve(Chart("", "", "", [Series("a", points)], log_y=True))] == [2, 2, 2]


def test_a_long_curve_is_thinned_and_keeps_its_spikes() -> None:
    points = [(float(x), 1.0) for x in range(100_000)]
    points[77_777] = (77_777.0, 9.0)
    thinned = chart.thin_points(points, 800)
    assert len(thinned) <= 802
    assert (77_777.0, 9.0) in thinned
    assert thinned == sorted(thinned)
    assert chart.thin_points(points[:100], 800) == points[:100]


def test_a_short_band_is_visible_and_the_axis_holds_all_bands() -> None:
    bands = [Band("start", -100, 0), Band("checkpoint", 50, 50.001), Band("damaged", math.inf, math.nan)]
    lines, boxes, texts = drawn(Chart("Loss", "step", "loss", [LINE], bands))
    (area,) = [box for box in boxes if box.size[1] > 50]
    (curve,) = [line for line in lines if line.colour == "series-1" and len(line.points) == 3]
    assert area.corner[0] + area.size[0] == pytest.approx(curve.points[0][0])
    (saved,) = [line for line in lines if line.colour == "series-5"]
    assert saved.points[0][0] == pytest.approx(curve.points[1][0], abs=0.1)
    assert {"start", "checkpoint", "loss", "-100", "100"} <= {text.text for text in texts}


def test_an_axis_begins_at_0_with_from_zero() -> None:
    busy = Series("GPU", [(0, 99.5), (1, 100.0)])
    assert "0" not in {text.text for text in drawn(Chart("", "x", "%", [busy]))[2] if text.anchor == "end"}
    assert "0" in {text.text for text in drawn(Chart("", "x", "%", [busy], from_zero=True))[2] if text.anchor == "end"}


def test_names_are_escaped() -> None:
    evil = '<script>alert("x")</script>&\x00\x1b[31m'
    picture = chart.render_svg(
        Chart(evil, evil, evil, [Series(evil, LINE.points), Series("b", [])], [Band(evil, 0, 1)])
    )
    root = ElementTree.fromstring(picture)
    assert not root.findall(".//{*}script")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", picture)


def test_a_chart_is_described_in_words() -> None:
    assert chart.describe(Chart("Loss", "step", "nats", [LINE])) == (
        "Loss: nats over step. loss from 4 to 1, at least 1, at most 4"
    )
    assert "no data" in chart.render_svg(Chart("Loss", "step", "nats", [Series("loss", [(0, math.nan)])]))


def test_the_picture_has_the_curve_in_its_colour(tmp_path: Path) -> None:
    loss = Chart("Loss", "step", "loss", [LINE])
    dots = Chart("Dots", "step", "loss", [Series("a", LINE.points, "dots")])
    chart.write_png([loss, dots, Chart("Nothing", "", "", [])], tmp_path / "chart.png")
    with Image.open(tmp_path / "chart.png") as image:
        assert image.size == (1280, 1800)
        x, y = curve(loss)[0].points[1]
        pixel = image.convert("RGB").getpixel((round(2 * x), round(2 * y)))
        assert pixel == pytest.approx((0x00, 0x72, 0xB2), abs=30)


def test_dashes_and_gaps_keep_their_lengths_around_corners() -> None:
    from hpc.charts.drawing import DASH, GAP, _dashes

    zigzag = [(float(x), float(x % 3)) for x in range(400)]
    dashes = _dashes(zigzag)
    total = sum(math.dist(a, b) for a, b in pairwise(zigzag))
    inked = sum(math.dist(a, b) for dash in dashes for a, b in pairwise(dash))
    assert inked / total == pytest.approx(DASH / (DASH + GAP), abs=0.02)
    assert len(dashes) == pytest.approx(total / (DASH + GAP), abs=2)
