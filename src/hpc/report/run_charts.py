"""The charts of a run: its curves, its throughput, the parts of its steps, the use of its nodes. Pure."""

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import pairwise
from statistics import median

from hpc.charts.chart import Band, Chart, Series
from hpc.monitor import node_usage
from hpc.monitor.event_files import PlotPoint, RunCurves
from hpc.monitor.node_usage import GAP_INTERVALS, NodeSamples, Phase
from hpc.report.run_statistics import PHASES, STEP_PARTS, AttemptSpan

LAST_CURVES = {"lr": "learning rate", "grad_norm": "gradient norm"}  # tags of curves that come last, and their titles
MAX_CURVE_CHARTS = 12
MAX_LINES = 3  # in a chart of nodes or GPUs; instead of more, their mean and the least used one
NUM_BINS = 300  # of the time, in which a mean is taken
CORES_LABEL = "% of the job's cores"
BAND_NAMES = PHASES | {"epoch": "end of an epoch"}
UNITS = ((7200, 3600, "hours"), (180, 60, "minutes"), (0, 1, "seconds"))


def curve_charts(curves: RunCurves) -> list[Chart]:
    """Return the charts of what was logged, the loss first; training and validation share a chart."""
    groups = _curve_groups(curves)
    titles = {name: LAST_CURVES.get(name, name.replace("_", " ")) for name in _shown_names(groups)}
    return [_curve_chart(title, groups[name], curves) for name, title in titles.items()]


def omitted_curves(curves: RunCurves) -> list[str]:
    """Return the names of the curves for which there is no room."""
    groups = _curve_groups(curves)
    return sorted(groups.keys() - set(_shown_names(groups)))


def _curve_groups(curves: RunCurves) -> dict[str, list[str]]:
    """Return the tags of curves by their name, without the part of the run that logged them."""
    groups: dict[str, list[str]] = defaultdict(list)
    for tag in curves.points:
        if not tag.startswith(("perf/", "test/", "hp_metric", "epoch")):
            groups[tag.rpartition("/")[2]].append(tag)
    return groups


def _shown_names(groups: Collection[str]) -> list[str]:
    """Return the curves that are shown, in their order: learning rate and gradient norm come last, but are shown."""
    last = [name for name in LAST_CURVES if name in groups]
    others = sorted((name for name in groups if name not in last), key=lambda name: (name != "loss", name))
    return [*others[: MAX_CURVE_CHARTS - len(last)], *last]


def _curve_chart(title: str, tags: Sequence[str], curves: RunCurves) -> Chart:
    series = [
        Series(tag, curves.points[tag]) for tag in sorted(tags, key=lambda tag: not tag.startswith(("step/", "train/")))
    ]
    return Chart(title, "step", "", series)


def throughput_tags(curves: RunCurves) -> list[tuple[str, str]]:
    """Return the tags of throughput with their names."""
    rates = [(tag, tag.removeprefix("perf/").replace("_", " ")) for tag in curves.points if "_per_second" in tag]
    others = [("perf/tflops", "TFLOP/s per device"), ("perf/mfu", "MFU")]
    return rates + [(tag, name) for tag, name in others if tag in curves.points]


def throughput_charts(curves: RunCurves) -> list[Chart]:
    """Return a chart for each rate of all devices together, and for MFU."""
    return [
        Chart(name, "step", "", [Series(name, curves.points[tag])], from_zero=True)
        for tag, name in throughput_tags(curves)
        if not tag.endswith("_per_device")
    ]


def step_charts(curves: RunCurves) -> list[Chart]:
    """Return a chart of the parts of a step, and one of the share of a step that waits for data."""
    series = [
        Series(part, [(x, 1000 * y) for x, y in curves.points[tag]])
        for part in STEP_PARTS
        if (tag := f"perf/{part}_seconds") in curves.points
    ]
    step_seconds = dict(curves.points.get("perf/step_seconds", []))
    data_points = curves.points.get("perf/data_seconds", [])
    shares = [(x, 100 * y / step_seconds[x]) for x, y in data_points if step_seconds.get(x)]
    waiting = Chart("waiting for data", "step", "% of a step", [Series("data", shares)], from_zero=True)
    return [Chart("parts of a step", "step", "milliseconds", series, from_zero=True), *([waiting] if shares else [])]


def usage_charts(nodes: Sequence[NodeSamples], phases: Sequence[Phase], spans: Sequence[AttemptSpan]) -> list[Chart]:
    """Return charts of the use of GPUs and CPUs over the time since the start of the run, with its phases."""
    begin, end = (spans[0].begin, max(span.end for span in spans)) if spans else _first_and_last_time(nodes)
    factor, unit = next((factor, unit) for shortest, factor, unit in UNITS if end - begin >= shortest)
    bands = _bands(phases, begin=begin, factor=factor)
    x_label, charts = f"{unit} since the start of the run", []
    for title, y_label, lines in _usage_lines(nodes):
        since_begin = {
            name: [((time - begin) / factor, value) for time, value in points] for name, points in lines.items()
        }
        series = [Series(name, points) for name, points in _mean_and_least(since_begin).items()]
        charts.append(Chart(title, x_label, y_label, series, bands, from_zero=True))
    return charts


def _bands(phases: Sequence[Phase], *, begin: float, factor: float) -> list[Band]:
    """Return the phases in units of `factor` seconds since `begin`, in the order of BAND_NAMES."""
    names, bands = list(BAND_NAMES), []
    named = [phase for phase in phases if phase.name in BAND_NAMES]
    for phase in sorted(named, key=lambda phase: names.index(phase.name)):
        since = phase.end if phase.name == "epoch" else phase.begin  # of an epoch only the end is marked
        bands.append(Band(BAND_NAMES[phase.name], (since - begin) / factor, (phase.end - begin) / factor))
    return bands


def _usage_lines(nodes: Sequence[NodeSamples]) -> list[tuple[str, str, dict[str, list[PlotPoint]]]]:
    """Return title, y label and lines of each chart: a line per GPU of a single node, else a line per node."""
    cpu = ("CPU use", CORES_LABEL, _column_points(nodes, "cpu_percent"))
    if not any(node.gpu_columns("percent") for node in nodes):
        return [cpu]
    if len(nodes) == 1:
        (node,) = nodes
        charts = [("GPU use", "%", "percent"), ("GPU memory", "GB", "memory_gb")]
        return [
            (title, unit, {f"GPU {i}": _points(node, values) for i, values in enumerate(node.gpu_columns(metric))})
            for title, unit, metric in charts
        ] + [cpu]
    gpus = {node.host: _points(node, node.gpu_percent()) for node in nodes if node.gpu_columns("percent")}
    return [("GPU use", "% of a node's GPUs", gpus), cpu]


def _column_points(nodes: Sequence[NodeSamples], column: str) -> dict[str, list[PlotPoint]]:
    return {node.host: _points(node, node.columns[column]) for node in nodes if column in node.columns}


def _points(node: NodeSamples, values: Sequence[float]) -> list[PlotPoint]:
    """Return (time, value), with NaN where no sample was taken for long, and between two attempts."""
    times, attempts = node.times, node.columns["attempt"]
    longest = GAP_INTERVALS * median([b - a for a, b in pairwise(times)]) if len(times) > 2 else math.inf
    points: list[PlotPoint] = []
    for index, (time, value) in enumerate(zip(times, values, strict=True)):
        if index and (time - points[-1][0] > longest or attempts[index] != attempts[index - 1]):
            points.append((time, math.nan))
        points.append((time, value))
    return points


def _mean_and_least(lines: dict[str, list[PlotPoint]]) -> dict[str, list[PlotPoint]]:
    """Return the lines, or if there are many, their mean and the one that is lowest on average."""
    if len(lines) <= MAX_LINES:
        return lines
    last = max((x for points in lines.values() for x, _ in points), default=0) or 1.0
    bins: dict[int, list[PlotPoint]] = defaultdict(list)
    for points in lines.values():
        for x, y in points:
            if y == y:
                bins[int(NUM_BINS * x / last)].append((x, y))
    mean_line = [
        (node_usage.known_mean([x for x, _ in points]), node_usage.known_mean([y for _, y in points]))
        for _, points in sorted(bins.items())
    ]
    means = {name: node_usage.known_mean([y for _, y in points]) for name, points in lines.items()}
    least = min((name for name, mean in means.items() if mean == mean), key=lambda name: means[name], default="")
    return {f"mean of {len(lines)}": mean_line} | ({f"least used: {least}": lines[least]} if least else {})


def _first_and_last_time(nodes: Sequence[NodeSamples]) -> tuple[float, float]:
    times = [time for node in nodes for time in node.times]
    return (min(times), max(times)) if times else (0.0, 1.0)


def node_summary(node: NodeSamples, phases: Sequence[Phase]) -> dict[str, str]:
    """Return a row of the table of nodes, by column: means while training, and peaks of the whole run."""
    training = node_usage.indices_while_training(node, phases)
    gpu_percent = node.gpu_percent()
    cpu_percent = node.columns.get("cpu_percent", ())
    in_training = {
        "GPU %": [gpu_percent[index] for index in training] if gpu_percent else [],
        "watts per GPU": [column[index] for column in node.gpu_columns("watts") for index in training],
        "CPU %": [cpu_percent[index] for index in training] if cpu_percent else [],
    }
    whole_run = {
        "peak GPU memory, GB": [value for column in node.gpu_columns("memory_gb") for value in column],
        "peak °C": [value for column in node.gpu_columns("celsius") for value in column],
        "peak memory, GB": list(node.columns.get("memory_gb", [])),
        "peak network in, MB/s": list(node.columns.get("net_in_mbs", [])),
        "peak disk read, MB/s": list(node.columns.get("disk_read_mbs", [])),
    }
    means = {name: node_usage.known_mean(values) for name, values in in_training.items()}
    known = {name: [value for value in values if value == value] for name, values in whole_run.items()}
    row = {"node": node.host, "samples": str(len(node.times))}
    row |= {name: f"{mean:.0f}" for name, mean in means.items() if mean == mean}
    return row | {name: f"{max(values):.1f}" for name, values in known.items() if values}
