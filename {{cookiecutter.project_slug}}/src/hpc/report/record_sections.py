"""The sections on the records of a run: its jobs, its attempts, its environment, its config. Pure."""

from collections.abc import Sequence
from datetime import datetime

from hpc.charts.units import format_seconds
from hpc.report.blocks import Block, Collapsed, Facts, Section, Table
from hpc.report.run_data import RunData
from hpc.report.run_table import scheduler_of_run

MAX_ROWS = 40  # of a table; of more rows, the last ones are shown
MAIN_PACKAGES = ("torch", "lightning", "deepspeed", "numpy")
PBS_NOTE = (
    "PBS counts only the processes of sessions that it started itself. Unless the site runs PBS's cgroups hook, MaxRSS"
    " and TotalCPU leave out the ranks, which run in sessions of their own. The samples of the nodes include them."
)


def record_sections(data: RunData) -> list[Section]:
    """Return the sections, of which each says so if its data are missing."""
    config: Block = Collapsed("config.yaml", data.config_text) if data.config_text else "There is no config.yaml."
    return [
        Section("Scheduler accounting", _accounts(data)),
        Section("Attempts", _attempts(data)),
        Section("Environment", _environment(data)),
        Section("Config", [config]),
    ]


def format_time(time: float) -> str:
    """Format a unix time in local time."""
    try:
        return f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "unknown"


def _accounts(data: RunData) -> list[Block]:
    if not data.accounts:
        return [data.no_accounts_reason]
    head = ["job", "state", "elapsed", "MaxRSS", "TotalCPU", "allocated", "exit code"]
    rows = [
        [account.job, account.state, account.elapsed, account.max_rss, account.total_cpu, account.allocated,
         account.exit_code]
        for account in data.accounts
    ]  # fmt: skip
    return [*_last_rows(head, rows), *([PBS_NOTE] if scheduler_of_run(data.run) == "pbs" else [])]


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


def _environment(data: RunData) -> list[Block]:
    made_by = data.made_by
    if not made_by:
        return ["There is no made_by.json."]
    packages, modules = (_texts(made_by.get(key)) for key in ("packages", "modules"))
    main_packages = [package for package in packages if package.partition("==")[0] in MAIN_PACKAGES]
    facts = [
        ("commit", str(made_by.get("commit") or "unknown: the code was not in git")),
        ("uncommitted changes", "see code.diff" if (data.run.path / "code.diff").exists() else ""),
        ("Python", str(made_by.get("python", "")).partition(" ")[0]),
        ("packages", ", ".join(main_packages)),
        ("modules", ", ".join(filter(None, modules)) or "none"),
        ("host", str(made_by.get("host") or "")),
    ]
    all_packages = [Collapsed(f"{len(packages)} packages", "\n".join(packages))] if packages else []
    return [Facts([(name, text) for name, text in facts if text]), *all_packages]


def _texts(value: object) -> list[str]:
    """Return the items of a list as text; a damaged file may hold anything else."""
    return [str(item) for item in value] if isinstance(value, list) else []
