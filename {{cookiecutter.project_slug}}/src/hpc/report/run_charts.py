"""The charts of a run, from its curves and from what its nodes did. Pure."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from hpc.charts.chart import Band, Chart, Series
from hpc.monitor import node_usage
from hpc.monitor.event_files import Curves, Point
from hpc.monitor.node_usage import GAP, Node, Phase
from hpc.report.numbers import CLOCK, Span

LAST = {"lr": "learning rate", "grad_norm": "gradient norm"}  # of the curves, and how they are called
MOST = 12  # charts of curves
LINES = 3  # in a chart of nodes or GPUs; of more, their mean and the least used one
BINS = 300
BANDS = {
    "start": "start",
    "validation": "validation",
    "checkpoint": "checkpoint",
    "test": "test",
    "epoch": "end of an epoch",
}
UNITS = ((7200, 3600, "hours"), (180, 60, "minutes"), (0, 1, "seconds"))


def curves(curves: Curves) -> list[Chart]:
    """Of the same quantity in training and in validation one chart; the loss first."""
    groups: dict[str, list[str]] = defaultdict(list)
    for tag in curves.points:
        if not tag.startswith(("perf/", "test/", "hp_metric", "epoch")):
            groups[tag.rpartition("/")[2]].append(tag)
    names = sorted(groups, key=lambda name: (name in LAST, name != "loss", name))
    return [_chart(LAST.get(name, name.replace("_", " ")), groups[name], curves) for name in names[:MOST]]


def _chart(title: str, tags: Sequence[str], curves: Curves) -> Chart:
    series = [Series(tag, curves.points[tag]) for tag in sorted(tags, key=lambda tag: not tag.startswith("train/"))]
    return Chart(title, "step", "", series)


def rates(curves: Curves) -> list[tuple[str, str]]:
    """Tags of throughput, and how each is called."""
    found = [(tag, tag.removeprefix("perf/").replace("_", " ")) for tag in curves.points if "_per_second" in tag]
    known = [("perf/tflops", "TFLOP/s per device"), ("perf/mfu", "MFU")]
    return found + [(tag, name) for tag, name in known if tag in curves.points]


def throughput(curves: Curves) -> list[Chart]:
    return [
        Chart(name, "step", "", [Series(name, curves.points[tag])], from_zero=True)
        for tag, name in rates(curves)
        if not tag.endswith("_per_device")
    ]


def step(curves: Curves) -> list[Chart]:
    """What a step goes into, and the share of it that is waiting for data."""
    names = ("compute", "data", "other")
    series = [
        Series(name, [(x, 1000 * y) for x, y in curves.points[tag]])
        for name in names
        if (tag := f"perf/{name}_seconds") in curves.points
    ]
    whole = dict(curves.points.get("perf/step_seconds", []))
    waits = [(x, 100 * y / whole[x]) for x, y in curves.points.get("perf/data_seconds", []) if whole.get(x)]
    shares = Chart("waiting for data", "step", "% of a step", [Series("data", waits)], from_zero=True)
    return [Chart("a step's parts", "step", "milliseconds", series, from_zero=True), *([shares] if waits else [])]


def use(nodes: Sequence[Node], phases: Sequence[Phase], spans: Sequence[Span]) -> list[Chart]:
    """What the GPUs did, or else the CPUs, over the time since the run began, with its phases."""
    begin, end = (spans[0].begin, max(span.end for span in spans)) if spans else _ends(nodes)
    factor, unit = next((factor, unit) for least, factor, unit in UNITS if end - begin >= least)
    bands = [
        Band(BANDS[one.what], (since - begin) / factor, (one.end - begin) / factor)
        for one in sorted(phases, key=lambda one: list(BANDS).index(one.what) if one.what in BANDS else 0)
        if one.what in BANDS
        and begin - CLOCK <= (since := one.end if one.what == "epoch" else one.begin) <= end + CLOCK
    ]
    axis, charts = f"{unit} since the run began", []
    for title, label, lines in _uses(nodes):
        shown = {name: _in_time(line, begin, end, factor) for name, line in lines.items()}
        series = [Series(name, points) for name, points in _few(shown).items()]
        charts.append(Chart(title, axis, label, series, bands, from_zero=True))
    return charts


def _uses(nodes: Sequence[Node]) -> list[tuple[str, str, dict[str, list[Point]]]]:
    """Title, unit and lines of each chart; of one node a line for each GPU, of several one for each node."""
    alone = nodes[0] if len(nodes) == 1 else None
    if not any(node.gpus("percent") for node in nodes):
        return [("CPU use", "% of the job's cores", _columns(nodes, "cpu_percent"))]
    if alone:
        both = [("GPU use", "%", "percent"), ("GPU memory", "GB", "memory_gb")]
        return [
            (title, unit, {f"GPU {i}": _points(alone, values) for i, values in enumerate(alone.gpus(metric))})
            for title, unit, metric in both
        ] + [("CPU use", "% of the job's cores", _columns(nodes, "cpu_percent"))]
    gpus = {node.host: _points(node, node.gpu_percent()) for node in nodes if node.gpus("percent")}
    return [
        ("GPU use", "% of a node's GPUs", gpus),
        ("CPU use", "% of the job's cores", _columns(nodes, "cpu_percent")),
    ]


def _columns(nodes: Sequence[Node], name: str) -> dict[str, list[Point]]:
    return {node.host: _points(node, node.columns[name]) for node in nodes if name in node.columns}


def _points(node: Node, values: Sequence[float]) -> list[Point]:
    """With a gap where no sample was taken for long, and between two attempts."""
    times, attempts = node.times, node.columns["attempt"]
    longest = GAP * median([b - a for a, b in pairwise(times)]) if len(times) > 2 else math.inf
    points: list[Point] = []
    for index, (when, number) in enumerate(zip(times, values, strict=True)):
        if index and (when - points[-1][0] > longest or attempts[index] != attempts[index - 1]):
            points.append((when, math.nan))
        points.append((when, number))
    return points


def _in_time(points: Sequence[Point], begin: float, end: float, factor: float) -> list[Point]:
    """Since the beginning, without what a wrong clock has put before or after the run."""
    return [((when - begin) / factor, value) for when, value in points if begin - CLOCK <= when <= end + CLOCK]


def _few(lines: dict[str, list[Point]]) -> dict[str, list[Point]]:
    """The lines themselves, or their mean and the one that is lowest on average."""
    if len(lines) <= LINES:
        return lines
    last = max((x for points in lines.values() for x, _ in points), default=0) or 1.0
    bins: dict[int, list[Point]] = defaultdict(list)
    for points in lines.values():
        for x, y in points:
            if y == y:
                bins[int(BINS * x / last)].append((x, y))
    middle = [
        (node_usage.mean([x for x, _ in some]), node_usage.mean([y for _, y in some]))
        for _, some in sorted(bins.items())
    ]
    known = {name: node_usage.mean([y for _, y in points]) for name, points in lines.items()}
    least = min((name for name in known if known[name] == known[name]), key=lambda name: known[name], default="")
    return {f"mean of {len(lines)}": middle} | ({f"least used: {least}": lines[least]} if least else {})


def _ends(nodes: Sequence[Node]) -> tuple[float, float]:
    times = [when for node in nodes for when in node.times]
    return (min(times), max(times)) if times else (0.0, 1.0)


def summary(node: Node, phases: Sequence[Phase]) -> dict[str, str]:
    """A line of the table of nodes: means while training, and what was most at any time."""
    kept, row = node_usage.training(node, phases), {"node": node.host, "samples": str(len(node.times))}
    percents, watts, heat = node.gpu_percent(), node.gpus("watts"), node.gpus("celsius")
    means = {
        "GPU %": [percents[index] for index in kept] if percents else [],
        "watts per GPU": [column[index] for column in watts for index in kept],
        "CPU %": [node.columns["cpu_percent"][index] for index in kept] if "cpu_percent" in node.columns else [],
    }
    most = {
        "GPU memory, GB": [value for column in node.gpus("memory_gb") for value in column],
        "°C, most": [value for column in heat for value in column],
        "memory, GB": list(node.columns.get("memory_gb", [])),
        "network in, MB/s": list(node.columns.get("net_in_mbs", [])),
        "disk read, MB/s": list(node.columns.get("disk_read_mbs", [])),
    }
    row |= {name: f"{mean:.0f}" for name, values in means.items() if (mean := node_usage.mean(values)) == mean}
    for name, values in most.items():
        if known := [value for value in values if value == value]:
            row[name if "most" in name else f"{name}, most"] = f"{max(known):.1f}"
    return row
