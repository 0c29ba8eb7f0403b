"""Record what each rank of a run does: a JSON line per event, in the file that TRIAL_TRACE names."""

import json
import os
from typing import Any

RANK = int(os.environ.get("PMI_RANK", 0))


def write(what: dict[str, Any]) -> None:
    """Write a line with one call, so that a killed process leaves only complete lines."""
    file = os.open(f"{os.environ['TRIAL_TRACE']}.{RANK}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (json.dumps(what) + "\n").encode())
    os.close(file)
