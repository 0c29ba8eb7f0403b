"""The sections of the report of a run, which a page and a terminal show alike. Pure."""

import shlex

from hpc.charts.axis import format_number
from hpc.charts.chart import Chart
from hpc.charts.units import format_energy, format_percent, format_seconds
from hpc.monitor import node_usage
from hpc.report import run_charts
from hpc.report.blocks import Block, BulletList, Facts, Figures, Preformatted, Section, Table
from hpc.report.endings import explain_ending, has_stopped_unfinished
from hpc.report.findings import MAX_FINDINGS, list_findings
from hpc.report.record_sections import MAX_ROWS, format_time, record_sections
from hpc.report.run_data import RunData
from hpc.report.run_statistics import STEP_PARTS, RunStatistics, config_value

STEP_PART_NAMES = {
    "compute": "computation",
    "data": "waiting for data",
    "other": "other: kernel launches, logging, hooks",
}


def run_sections(data: RunData) -> list[Section]:
    """Return all sections. One whose data are missing has a sentence that says so."""
    overview = Section(f"{data.row.run}: {data.row.state}", _overview(data))
    if data.network_table:
        return [overview, Section("Network check", [Preformatted(data.network_table)]), *record_sections(data)]
    no_curves = "The events files contain no curves."
    return [
        overview,
        Section("What limits the run", [BulletList(_findings(data))]),
        Section("Curves", _figures(run_charts.curve_charts(data.curves), no_curves)),
        Section("Throughput", _throughput(data)),
        Section("Where the time goes", _time(data)),
        Section("Use of the nodes", _nodes(data)),
        Section("Energy", [_energy(data)]),
        *record_sections(data),
    ]


def _overview(data: RunData) -> list[Block]:
    blocks: list[Block] = [data.row.note] if data.row.note else []
    blocks.append(Facts([(name, text) for name, text in _overview_facts(data) if text]))
    if not any(attempt.end for attempt in data.run.attempts) and data.row.step is None:
        blocks.append("No step was recorded.")
    if data.notes:
        blocks += ["Some data of this run are missing or damaged:", BulletList([f"{note}." for note in data.notes])]
    return blocks


def _overview_facts(data: RunData) -> list[tuple[str, str]]:
    run, row, spans = data.run, data.row, data.spans
    total_seconds = sum(span.seconds for span in spans)
    duration = "duration" if spans and spans[-1].is_end_recorded and data.has_times else "observed for"
    num_ranks = max((attempt.world_size for attempt in run.attempts), default=0)
    num_nodes = row.nodes or 1
    return [
        *([("task", "network check")] if data.network_table else _training_facts(data)),
        ("nodes × ranks", f"{num_nodes} × {num_ranks // max(num_nodes, 1)}" if num_ranks else ""),
        ("started", format_time(spans[0].begin) if spans else ""),
        (duration, format_seconds(total_seconds) if spans else ""),
        ("attempts", str(row.attempts)),
        ("last step", "" if row.step is None or data.network_table else str(row.step)),
        ("result", "" if row.metric == "-" else row.metric),
        ("node-hours", f"{row.node_hours:.2f}" if spans and data.has_times else ""),
        ("job", "" if row.job == "-" else row.job),
        ("directory", str(run.path)),
    ]


def _training_facts(data: RunData) -> list[tuple[str, str]]:
    targets = [config_value(data.config, f"{key}._target_") for key in ("model.network", "data")]
    class_names = [str(target).rpartition(".")[2] for target in targets if target]
    return [
        ("task", " on ".join(class_names)),
        ("strategy", str(config_value(data.config, "strategy.name") or "")),
        ("precision", str(config_value(data.config, "trainer.precision") or "")),
    ]


def _findings(data: RunData) -> list[str]:
    """Return at most MAX_FINDINGS sentences. If the run stopped unfinished, the first one explains that."""
    findings, ending = list_findings(data.statistics, data.config), next(reversed(data.endings), None)
    if ending is None or ending.is_expected or not has_stopped_unfinished(data.row):
        return findings
    program = "submit.py" if data.run.attempts[-1].job else "train.py"
    resume_command = f"python {program} resume={shlex.quote(str(data.run.path))}"
    return [explain_ending(ending, data.config, resume_command), *findings][:MAX_FINDINGS]


def _figures(charts: list[Chart], otherwise: str) -> list[Block]:
    return [Figures(charts)] if charts else [otherwise]


def _throughput(data: RunData) -> list[Block]:
    rows = []
    for tag, name in run_charts.throughput_tags(data.curves):
        mean, points = data.curves.mean_rate(tag), data.curves.points.get(tag, [])
        if mean is not None:
            numbers = (mean, max(y for _, y in points), points[-1][1])
            rows.append([name, *map(format_percent if name == "MFU" else format_number, numbers)])
    if not rows:
        return ["No throughput was logged: there were too few steps, or callbacks.throughput is off."]
    return [Table(["", "mean", "max", "last"], rows), Figures(run_charts.throughput_charts(data.curves))]


def _time(data: RunData) -> list[Block]:
    statistics = data.statistics
    blocks: list[Block] = []
    if statistics.phase_seconds:
        blocks.append(_phase_table(statistics))
    else:
        reason = "there is no monitor/phases.jsonl" if data.has_times else "the files that record them are damaged"
        blocks.append(f"The times of start-up, validation and checkpoints are unknown: {reason}.")
    if statistics.step_seconds.get("step"):
        blocks += [_step_table(statistics), Figures(run_charts.step_charts(data.curves))]
    else:
        blocks.append("The parts of a step are unknown: no step was timed.")
    return [*blocks, f"Profile: {data.curves.profile}"] if data.curves.profile else blocks


def _phase_table(statistics: RunStatistics) -> Table:
    rows = [
        [name, format_seconds(spent), format_percent(statistics.share(name)),
         str(statistics.phase_counts.get(name) or "")]
        for name, spent in sorted(statistics.phase_seconds.items(), key=lambda pair: -pair[1])
    ]  # fmt: skip
    return Table(["part of the run", "total", "share", "count"], rows)


def _step_table(statistics: RunStatistics) -> Table:
    rows = [
        [STEP_PART_NAMES[part], format_seconds(statistics.step_seconds[part]), format_percent(statistics.share(part))]
        for part in STEP_PARTS
        if part in statistics.step_seconds
    ]
    whole = ["whole step", format_seconds(statistics.step_seconds["step"]), format_percent(1)]
    return Table(["part of a step", "mean", "share"], [*rows, whole])


def _nodes(data: RunData) -> list[Block]:
    sampled = [node for node in data.nodes if node.times]
    if not sampled:
        return ["There are no samples of any node."]
    least_used = sorted(sampled, key=node_usage.mean_device_percent)[:MAX_ROWS]
    is_shortened = len(sampled) > MAX_ROWS
    rows = [run_charts.node_summary(node, data.phases) for node in (least_used if is_shortened else sampled)]
    titles = [title for title in dict.fromkeys(title for row in rows for title in row)]
    return [
        Facts(_usage_facts(data.statistics)),
        Figures(run_charts.usage_charts(data.nodes, data.phases, data.spans), wide=True),
        *([f"The {MAX_ROWS} least used of {len(sampled)} nodes:"] if is_shortened else []),
        Table(titles, [[row.get(title, "") for title in titles] for row in rows]),
    ]


def _usage_facts(statistics: RunStatistics) -> list[tuple[str, str]]:
    numbers = [
        ("GPU use in training", statistics.gpu_percent, "%"),
        ("peak GPU memory", statistics.gpu_memory_gb, "GB"),
        ("memory of such a GPU", statistics.gpu_capacity_gb, "GB"),
        ("CPU use in training", statistics.cpu_percent, "%"),
    ]
    return [
        (name, format_percent(number / 100) if unit == "%" else f"{number:.1f} GB")
        for name, number, unit in numbers
        if number is not None
    ]


def _energy(data: RunData) -> str:
    if data.joules is None:
        return "The energy is unknown: no GPU's power was sampled."
    with_power = [node for node in data.nodes if node.gpu_columns("watts")]
    num_gpus, num_nodes = sum(len(node.gpu_columns("watts")) for node in with_power), len(with_power)
    devices = f"{num_gpus} GPU{'s' * (num_gpus > 1)} of {num_nodes} node{'s' * (num_nodes > 1)}"
    return (
        f"{format_energy(data.joules)}, from the sampled power of {devices}."
        " The energy of CPUs, memory, network and cooling is not included."
    )
