"""What stands around the training of a run: its jobs, its attempts, what it was made of. Pure."""

from collections.abc import Sequence
from datetime import datetime

from hpc.charts.units import seconds
from hpc.report.blocks import Block, Facts, Fold, Section, Table
from hpc.report.run_data import Measured
from hpc.report.run_table import scheduler

SHOWN = 40  # rows of a table; of more, the last ones
UNCOUNTED = (
    "PBS counts the processes of the sessions that it has started itself. Unless the site runs its cgroups hook, MaxRSS"
    " and TotalCPU leave out the ranks, which are in sessions of their own: see what the nodes did."
)


def around(measured: Measured) -> list[Section]:
    return [
        Section("The scheduler's view", _accounts(measured)),
        Section("Attempts", _attempts(measured)),
        Section("Environment", _environment(measured)),
        Section(
            "Config", [Fold("config.yaml", text)] if (text := measured.config_text) else ["There is no config.yaml."]
        ),
    ]


def _accounts(measured: Measured) -> list[Block]:
    if not measured.accounts:
        return [measured.no_accounts]
    head = ["job", "state", "elapsed", "MaxRSS", "TotalCPU", "allocated", "exit code"]
    rows = [[one.job, one.state, one.elapsed, one.max_rss, one.total_cpu, one.allocated, one.exit_code]
            for one in measured.accounts]  # fmt: skip
    return [*_long(head, rows), *([UNCOUNTED] if scheduler(measured.run) == "pbs" else [])]


def _attempts(measured: Measured) -> list[Block]:
    rows = []
    for attempt, span, ended in zip(measured.run.attempts, measured.spans, measured.endings, strict=True):
        hosts = f"{len(attempt.hosts)}: {', '.join(map(str, attempt.hosts[:2]))}{' ...' if attempt.hosts[2:] else ''}"
        cells = [attempt.number, attempt.job or "", hosts, attempt.world_size, when(span.begin), seconds(span.seconds)]
        step = "" if ended.step is None else str(ended.step)
        rows.append([*map(str, cells), step, ended.outcome, ended.why])
    head = ["", "job", "nodes", "ranks", "began", "lasted", "to step", "outcome", "why"]
    return _long(head, rows) if rows else ["None has begun."]


def _long(head: list[str], rows: Sequence[list[str]]) -> list[Block]:
    table = Table(head, list(rows[-SHOWN:]))
    return [table] if len(rows) <= SHOWN else [f"The last {SHOWN} of {len(rows)}:", table]


def _environment(measured: Measured) -> list[Block]:
    made = measured.made_by
    if not made:
        return ["There is no made_by.json."]
    packages, modules = ([str(one) for one in found] if isinstance(found := made.get(key), list) else []
                         for key in ("packages", "modules"))  # fmt: skip
    main = [one for one in packages if one.partition("==")[0] in ("torch", "lightning", "deepspeed", "numpy")]
    facts = [
        ("commit", str(made.get("commit") or "not known: the code was not in git")),
        ("not committed", "see code.diff" if (measured.run.path / "code.diff").exists() else ""),
        ("Python", str(made.get("python", "")).partition(" ")[0]),
        ("packages", ", ".join(main)),
        ("modules", ", ".join(filter(None, modules)) or "none"),
        ("made on", str(made.get("host") or "")),
    ]
    fold = [Fold(f"{len(packages)} packages", "\n".join(packages))] if packages else []
    return [Facts([(name, text) for name, text in facts if text]), *fold]


def when(time: float) -> str:
    try:
        return f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "no time"
