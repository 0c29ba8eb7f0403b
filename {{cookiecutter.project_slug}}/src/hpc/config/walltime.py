"""Wall times, as people type them and as schedulers read them."""

import re

from hpc.config.errors import ConfigError

TIME_FORMATS = "D-HH:MM:SS, H:MM:SS, D-HH:MM, D-HH or whole minutes"


def walltime_seconds(key: str, text: str) -> int:
    """Seconds of a time as Slurm writes them, except `a:b`, which is minutes to Slurm and hours to PBS.

    Raises:
        ConfigError: none of the forms that `TIME` names, or no time at all.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)|(\d+)-(\d+)(?::([0-5]\d))?|(\d+)", text)
    if not found:
        raise ConfigError(key, text, f"is a time: {TIME_FORMATS}", f"{key}={_suggest_time(text)}")
    days, hours, minutes, seconds, short_days, short_hours, short_minutes, plain = (int(n or 0) for n in found.groups())
    total = ((days + short_days) * 24 + hours + short_hours) * 3600 + (minutes + short_minutes + plain) * 60 + seconds
    if not total:
        raise ConfigError(key, text, f"is a time: {TIME_FORMATS}", f"{key}=1:00:00")
    return total


def format_walltime(seconds: int) -> str:
    """Seconds as HH:MM:SS, which Slurm and PBS read alike."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _suggest_time(text: str) -> str:
    found = re.fullmatch(r"(\d+):(\d\d)", text)
    return f"{found[1]}:{found[2]}:00 (hours) or 0:{found[1]:0>2}:{found[2]} (minutes)" if found else "1:30:00"
