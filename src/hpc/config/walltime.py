"""Wall times, as people type them and as schedulers read them."""

import re

from hpc.config.errors import ConfigError

TIME_FORMATS = "D-HH:MM:SS, H:MM:SS, D-HH:MM, D-HH or whole minutes"


def walltime_seconds(key: str, text: str) -> int:
    """Return the seconds of a wall time in one of Slurm's formats.

    The format `a:b` is rejected: Slurm reads it as minutes and PBS as hours.

    Raises:
        ConfigError: the text has none of the formats in `TIME_FORMATS`, or the time is zero.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)|(\d+)-(\d+)(?::([0-5]\d))?|(\d+)", text)
    if not match:
        raise ConfigError(key, text, f"must be a time as {TIME_FORMATS}", f"{key}={_suggest_time(text)}")
    days, hours, minutes, seconds, short_days, short_hours, short_minutes, plain = (int(n or 0) for n in match.groups())
    total = ((days + short_days) * 24 + hours + short_hours) * 3600 + (minutes + short_minutes + plain) * 60 + seconds
    if not total:
        raise ConfigError(key, text, "must be longer than zero", f"{key}=1:00:00")
    return total


def format_walltime(seconds: int) -> str:
    """Return seconds as HH:MM:SS, which Slurm and PBS read alike."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _suggest_time(text: str) -> str:
    """Return both readings of an ambiguous `a:b`, or an example of a time."""
    match = re.fullmatch(r"(\d+):(\d\d)", text)
    return f"{match[1]}:{match[2]}:00 (hours) or 0:{match[1]:0>2}:{match[2]} (minutes)" if match else "1:30:00"
