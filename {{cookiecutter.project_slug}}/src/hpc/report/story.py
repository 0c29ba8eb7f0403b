"""What is told of a run and in which order: numbers become sections, which a page and a terminal show alike. Pure."""

import shlex

from hpc.charts.axis import number
from hpc.charts.chart import Chart
from hpc.charts.units import energy, percent, seconds
from hpc.monitor import node_usage
from hpc.report import run_charts
from hpc.report.blocks import Block, Facts, Figures, Items, Plain, Section, Table
from hpc.report.endings import advice, over
from hpc.report.findings import MOST, findings
from hpc.report.numbers import PARTS, value
from hpc.report.run_data import Measured
from hpc.report.surroundings import SHOWN, around, when

MEANINGS = {"compute": "computing", "data": "waiting for data", "other": "neither: launching, logging, hooks"}


def story(measured: Measured) -> list[Section]:
    """All sections, those of which nothing is known with a sentence that says so."""
    what = Section(f"{measured.row.run}: {measured.row.state}", _what(measured))
    if measured.network:
        return [what, Section("The network", [Plain(measured.network)]), *around(measured)]
    return [
        what,
        Section("What limits it", [Items(_sentences(measured))]),
        Section("Curves", _figures(run_charts.curves(measured.curves), "No curve is in the events files.")),
        Section("Throughput", _throughput(measured)),
        Section("Where the time goes", _time(measured)),
        Section("What the nodes did", _nodes(measured)),
        Section("Energy", [_energy(measured)]),
        *around(measured),
    ]


def _what(measured: Measured) -> list[Block]:
    run, row, spans = measured.run, measured.row, measured.spans
    total = sum(span.seconds for span in spans)
    words = [value(measured.config, f"{key}._target_") for key in ("model.network", "data")]
    named = [str(word).rpartition(".")[2] for word in words if word]
    trained = [
        ("what", " on ".join(named)),
        ("strategy", str(value(measured.config, "strategy.name") or "")),
        ("precision", str(value(measured.config, "trainer.precision") or "")),
    ]
    ranks = max((attempt.world_size for attempt in run.attempts), default=0)
    facts = [
        *([("what", "a check of the network")] if measured.network else trained),
        ("nodes × ranks", f"{row.nodes or 1} × {ranks // max(row.nodes or 1, 1)}" if ranks else ""),
        ("began", when(spans[0].begin) if spans else ""),
        ("lasted" if spans and spans[-1].sure and measured.whole else "seen for", seconds(total) if spans else ""),
        ("attempts", str(row.attempts)),
        ("last step", "" if row.step is None or measured.network else str(row.step)),
        ("result", "" if row.metric == "-" else row.metric),
        ("node-hours", f"{row.node_hours:.2f}" if spans and measured.whole else ""),
        ("job", "" if row.job == "-" else row.job),
        ("directory", str(run.path)),
    ]
    blocks: list[Block] = [row.note] if row.note else []
    blocks.append(Facts([(name, text) for name, text in facts if text]))
    if not any(attempt.end for attempt in run.attempts) and row.step is None:
        blocks.append("It made no step that was noted.")
    if measured.notes:
        blocks.append(Items([f"Missing: {note}." for note in measured.notes]))
    return blocks


def _sentences(measured: Measured) -> list[str]:
    """Three at most; of a run that did not end well the first says so."""
    told, ended = findings(measured.numbers, measured.config), next(reversed(measured.endings), None)
    if ended is None or ended.well or not over(measured.row):
        return told
    verb = "submit.py" if measured.run.attempts[-1].job else "train.py"
    again = f"python {verb} resume={shlex.quote(str(measured.run.path))}"
    return [advice(ended, measured.config, again), *told][:MOST]


def _figures(charts: list[Chart], otherwise: str) -> list[Block]:
    return [Figures(charts)] if charts else [otherwise]


def _throughput(measured: Measured) -> list[Block]:
    curves = measured.curves
    means = [(label, curves.rate(tag), curves.points.get(tag, [])) for tag, label in run_charts.rates(curves)]
    rows = [
        [
            label,
            *(percent(x) if label == "MFU" else number(x) for x in (mean, max(y for _, y in points), points[-1][1])),
        ]
        for label, mean, points in means
        if mean is not None
    ]
    if not rows:
        return ["No throughput was logged: there were too few steps, or callbacks.throughput is off."]
    return [Table(["", "mean", "most", "last"], rows), Figures(run_charts.throughput(curves))]


def _time(measured: Measured) -> list[Block]:
    numbers, blocks = measured.numbers, []
    if numbers.wall:
        rows = [
            [name, seconds(spent), percent(numbers.share(name)), str(numbers.times.get(name) or "")]
            for name, spent in sorted(numbers.wall.items(), key=lambda pair: -pair[1])
        ]
        blocks.append(Table(["of the run", "in all", "share", "times"], rows))
    else:
        why = "there is no monitor/phases.jsonl" if measured.whole else "the files that tell are damaged"
        blocks.append(f"When it started, validated and saved is not known: {why}.")
    if numbers.step.get("step"):
        rows = [
            [MEANINGS[part], seconds(numbers.step[part]), percent(numbers.share(part))]
            for part in PARTS
            if part in numbers.step
        ]
        whole = ["all", seconds(numbers.step["step"]), percent(1)]
        blocks += [Table(["of a step", "mean", "share"], [*rows, whole]), Figures(run_charts.step(measured.curves))]
    else:
        blocks.append("What a step consists of is not known: no step was timed.")
    return [*blocks, f"Profile: {text}"] if (text := measured.curves.profile) else blocks


def _nodes(measured: Measured) -> list[Block]:
    if not any(node.times for node in measured.nodes):
        return ["There are no samples of any node."]
    numbers, sampled = measured.numbers, [node for node in measured.nodes if node.times]
    few = sorted(sampled, key=node_usage.busy)[:SHOWN] if len(sampled) > SHOWN else sampled
    rows = [run_charts.summary(node, measured.phases) for node in few]
    titles = [title for title in dict.fromkeys(title for row in rows for title in row)]
    facts = [
        ("GPUs busy in training", "" if numbers.gpu_percent is None else percent(numbers.gpu_percent / 100)),
        ("GPU memory, at most", "" if numbers.gpu_memory_gb is None else f"{numbers.gpu_memory_gb:.1f} GB"),
        ("GPU memory there is", "" if numbers.gpu_room_gb is None else f"{numbers.gpu_room_gb:.1f} GB"),
        ("CPUs busy in training", "" if numbers.cpu_percent is None else percent(numbers.cpu_percent / 100)),
    ]
    return [
        Facts([(name, text) for name, text in facts if text]),
        Figures(run_charts.use(measured.nodes, measured.phases, measured.spans), wide=True),
        *([f"The {SHOWN} of {len(sampled)} nodes that did least:"] if few is not sampled else []),
        Table(titles, [[row.get(title, "") for title in titles] for row in rows]),
    ]


def _energy(measured: Measured) -> str:
    if measured.joules is None:
        return "Not known: no GPU's power was sampled."
    gpus = sum(len(node.gpus("watts")) for node in measured.nodes)
    hosts = sum(bool(node.gpus("watts")) for node in measured.nodes)
    counted = f"{gpus} GPU{'s' * (gpus > 1)} of {hosts} node{'s' * (hosts > 1)}, their sampled power over time"
    return f"{energy(measured.joules)}: {counted}. CPUs, memory, network and cooling are not counted."
