"""The sections of the report of a run, which a page and a terminal show alike. Pure."""

import shlex
from collections.abc import Sequence
from datetime import datetime

from hpc.charts.units import format_energy, format_percent, format_seconds, format_si
from hpc.monitor import node_usage
from hpc.report import run_charts
from hpc.report.blocks import Block, Figures, Preformatted, Section, Table
from hpc.report.endings import explain_ending, has_stopped_unfinished
from hpc.report.findings import MAX_FINDINGS, list_findings
from hpc.report.run_data import RunData
from hpc.report.run_statistics import STEP_PARTS, RunStatistics, config_value

MAX_ROWS = 40  # of a table; of more rows, the last ones are shown
MAIN_PACKAGES = ("torch", "lightning", "deepspeed", "numpy")
STEP_PART_NAMES = {
    "compute": "computation",
    "data": "waiting for data",
    "other": "other: kernel launches, logging, hooks",
}


def run_sections(data: RunData) -> list[Section]:
    """Return all sections. A section without data says why."""
    curves, names = run_charts.curve_charts(data.curves), run_charts.omitted_curves(data.curves)
    omitted = [f"TensorBoard shows {len(names)} more: {', '.join(names)}."] if names else []
    training = [
        Section("Curves", [Figures(curves) if curves else "The events files contain no curves.", *omitted]),
        Section("Throughput", _throughput(data)),
    ]
    measured = [
        Section("What limits the run", [_findings(data)]),
        *([] if _task(data) == "predict" else training),
        Section("Where the time goes", _time(data)),
        Section("Use of the nodes", _nodes(data)),
    ]
    network_check = [Section("Network check", [Preformatted(data.network_table)])]
    return [
        Section(f"{data.row.run}: {data.row.state}", _overview(data)),
        *(network_check if data.network_table else measured),
        Section("Attempts", _attempts(data)),
        Section("Environment", [_environment(data)]),
        Section(
            "Config",
            [Preformatted(data.config_text, "config.yaml") if data.config_text else "There is no config.yaml."],
        ),
    ]


def format_time(time: float) -> str:
    """Format a unix time in local time."""
    try:
        return f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "unknown"


def _overview(data: RunData) -> list[Block]:
    blocks: list[Block] = [data.row.note] if data.row.note else []
    blocks.append({name: text for name, text in _overview_facts(data).items() if text})
    if not any(attempt.end for attempt in data.run.attempts) and data.row.step is None:
        blocks.append("No step was recorded.")
    if data.notes:
        blocks += ["Some data of this run are missing or damaged:", [f"{note}." for note in data.notes]]
    return blocks


def _overview_facts(data: RunData) -> dict[str, str]:
    run, row, spans = data.run, data.row, data.spans
    num_ranks = max((attempt.world_size for attempt in run.attempts), default=0)
    num_nodes = row.nodes or 1
    duration = "duration" if spans and spans[-1].is_end_recorded and data.has_times else "observed for"
    return {
        "task": "" if _task(data) == "train" else _task(data),
        **({} if data.network_table else _training_facts(data)),
        "nodes × ranks": f"{num_nodes} × {num_ranks // max(num_nodes, 1)}" if num_ranks else "",
        "started": format_time(spans[0].begin) if spans else "",
        duration: format_seconds(sum(span.seconds for span in spans)) if spans else "",
        "attempts": str(row.attempts),
        "last step": "" if row.step is None or _task(data) != "train" else str(row.step),
        "result": "" if row.metric == "-" else row.metric,
        "node-hours": f"{row.node_hours:.2f}" if spans and data.has_times else "",
        "job": "" if row.job == "-" else row.job,
        "directory": str(run.path),
    }


def _task(data: RunData) -> str:
    return "network check" if data.network_table else str(config_value(data.config, "task") or "train")


def _training_facts(data: RunData) -> dict[str, str]:
    network, model, samples = (
        config_value(data.config, f"{key}._target_") for key in ("model.network", "model", "data")
    )
    targets = [network or model, samples]
    return {
        "checkpoint": str(config_value(data.config, "ckpt") or ""),
        "model": " on ".join(str(target).rpartition(".")[2] for target in targets if target),
        "strategy": str(config_value(data.config, "strategy.name") or ""),
        "precision": str(config_value(data.config, "trainer.precision") or ""),
    }


def _findings(data: RunData) -> list[str]:
    """Return at most MAX_FINDINGS sentences. If the run stopped unfinished, the first one explains that."""
    findings, ending = list_findings(data.statistics, data.config), next(reversed(data.endings), None)
    if ending is None or ending.is_expected or not has_stopped_unfinished(data.row):
        return findings
    program = "submit.py" if data.run.attempts[-1].job else "train.py"
    resume_command = f"python {program} resume={shlex.quote(str(data.run.path))}"
    return [explain_ending(ending, data.config, resume_command), *findings][:MAX_FINDINGS]


def _throughput(data: RunData) -> list[Block]:
    rows = []
    for tag, name in run_charts.throughput_tags(data.curves):
        mean, points = data.curves.mean_rate(tag), data.curves.points.get(tag, [])
        if mean is not None:
            numbers = (mean, max(y for _, y in points), points[-1][1])
            rows.append([name, *map(format_percent if name == "MFU" else format_si, numbers)])
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
    if slow := statistics.slow_rank:
        seconds = {f"rank {slow.rank} by itself": slow.own_seconds, "fastest rank by itself": slow.fastest_seconds}
        seconds |= {f"waiting for rank {slow.rank}": slow.wait_seconds}
        whole_seconds = statistics.step_seconds["step"]
        rows += [[name, format_seconds(own), format_percent(own / whole_seconds)] for name, own in seconds.items()]
    whole = ["whole step", format_seconds(statistics.step_seconds["step"]), format_percent(1)]
    return Table(["part of a step", "mean", "share"], [*rows, whole])


def _nodes(data: RunData) -> list[Block]:
    sampled = [node for node in data.nodes if node.times]
    if not sampled:
        return ["There are no samples of any node."]
    least_used = sorted(sampled, key=node_usage.mean_device_percent)[:MAX_ROWS]
    is_shortened = len(sampled) > MAX_ROWS
    rows = [run_charts.node_summary(node, data.phases) for node in (least_used if is_shortened else sampled)]
    titles = list(dict.fromkeys(title for row in rows for title in row))
    return [
        _usage_facts(data),
        Figures(run_charts.usage_charts(data.nodes, data.phases, data.spans), wide=True),
        *([f"The {MAX_ROWS} least used of {len(sampled)} nodes:"] if is_shortened else []),
        Table(titles, [[row.get(title, "") for title in titles] for row in rows]),
    ]


def _usage_facts(data: RunData) -> dict[str, str]:
    statistics = data.statistics
    percents = {"GPU use in training": statistics.gpu_percent, "CPU use in training": statistics.cpu_percent}
    sizes = {"peak GPU memory": statistics.gpu_memory_gb, "memory of such a GPU": statistics.gpu_capacity_gb}
    facts = {name: format_percent(percent / 100) for name, percent in percents.items() if percent is not None}
    facts |= {name: f"{gigabytes:.1f} GB" for name, gigabytes in sizes.items() if gigabytes is not None}
    if data.joules is None:
        return facts
    num_gpus = sum(len(node.gpu_columns("watts")) for node in data.nodes)
    num_known = sum(node.num_gpus_with_power() for node in data.nodes)
    gpus = (
        f"{num_gpus} GPU(s)" if num_known == num_gpus else f"{num_known} of {num_gpus} GPU(s): others report no power"
    )
    return facts | {"energy of the GPUs": f"{format_energy(data.joules)}, of {gpus}"}


def _attempts(data: RunData) -> list[Block]:
    rows = []
    for attempt, span, ending in zip(data.run.attempts, data.spans, data.endings, strict=True):
        hosts = f"{len(attempt.hosts)}: {', '.join(map(str, attempt.hosts[:2]))}{' ...' if attempt.hosts[2:] else ''}"
        started, duration = format_time(span.begin), format_seconds(span.seconds)
        step = "" if ending.step is None else ending.step
        cells = [attempt.number, attempt.job or "", hosts, attempt.world_size, started, duration, step]
        rows.append([*map(str, cells), ending.outcome, ending.reason])
    head = ["", "job", "nodes", "ranks", "started", "duration", "last step", "outcome", "reason"]
    return _last_rows(head, rows) if rows else ["No attempt has started."]


def _last_rows(head: list[str], rows: Sequence[list[str]]) -> list[Block]:
    table = Table(head, list(rows[-MAX_ROWS:]))
    return [table] if len(rows) <= MAX_ROWS else [f"The last {MAX_ROWS} of {len(rows)}:", table]


def _environment(data: RunData) -> Block:
    made_by = data.made_by
    if not made_by:
        return "There is no made_by.json."
    lists = {key: made_by.get(key) for key in ("packages", "modules")}  # a damaged file may hold anything
    texts = {key: [str(item) for item in value] if isinstance(value, list) else [] for key, value in lists.items()}
    facts = {
        "commit": str(made_by.get("commit") or "unknown: the code was not in git"),
        "hpc-ml": ", ".join(str(made_by[key]) for key in ("hpc", "hpc_origin") if made_by.get(key)),
        "uncommitted changes": "see code.diff" if (data.run.path / "code.diff").exists() else "",
        "Python": str(made_by.get("python", "")).partition(" ")[0],
        "packages": ", ".join(package for package in texts["packages"] if package.split("==")[0] in MAIN_PACKAGES),
        "modules": ", ".join(filter(None, texts["modules"])) or "none",
        "host": str(made_by.get("host") or ""),
    }
    return {name: text for name, text in facts.items() if text}
