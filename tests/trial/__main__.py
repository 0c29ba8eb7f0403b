"""Run a campaign of trials: python tests/trial twins --count 500 --seed 1

Draws follow from the seed and their number. `--only 17` repeats one. `--day 5` adds five of the seed of the day.
"""

import argparse
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # in the place of this folder, whose modules are those of `trial`

# Each with its class, and how many draws there are unless --count says so.
CAMPAIGNS = {
    "twins": ("Twins", 50),
    "neighbours": ("Neighbours", 100),
    "hostile": ("Hostile", 300),
    "chaos": ("Chaos", 100),
    "ports": ("Ports", 1000),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python tests/trial", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("campaign", choices=CAMPAIGNS)
    parser.add_argument("--count", type=int, help="how many draws; of chaos, faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--only", type=int, nargs="+", help="the draws of these numbers")
    parser.add_argument("--kind", action="append", default=[], help="only draws of this kind")
    parser.add_argument("--day", type=int, default=0, metavar="N", help="add N draws of the seed of the day")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no draw after that")
    parser.add_argument("--jobs", type=int, help="draws at a time; only of twins")
    parser.add_argument("--draw", type=Path, help="a draw in JSON, as a failure prints it; only of twins")
    parser.add_argument("--shrink", action="store_true", help="reduce one draw, of --only or --draw; only of twins")
    parser.add_argument("--controls", action="store_true", help="first see that broken programs are found")
    parser.add_argument("--project", type=Path, help="a baked project; default: bake one")
    parser.add_argument("--out", type=Path, help="a page with marks, between which the table goes; of chaos and ports")
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # SystemExit removes nodes and mounts
    module, (kind, count) = import_module(f"trial.{asked.campaign}"), CAMPAIGNS[asked.campaign]
    folder = Path(tempfile.mkdtemp(prefix=asked.campaign)).resolve()
    if reason := getattr(module, "missing", lambda: "")():
        print(f"{asked.campaign} is left out: {reason}")
        return 0
    asked.count = count if asked.count is None else asked.count
    with getattr(module, kind)(folder, asked.project) as campaign:
        wrong = (one_draw if asked.shrink or asked.draw else many_draws)(campaign, asked)
    if wrong:
        print("\n".join(wrong))
        return 1
    shutil.rmtree(folder)
    return 0


def one_draw(campaign, asked: argparse.Namespace) -> list[str]:
    """Try the draw of a file, or reduce a draw."""
    from trial import campaign as campaigns
    from trial.twins import whole

    drawn = whole(json.loads(asked.draw.read_text())) if asked.draw else campaign.draw(asked.seed, asked.only[0])
    if asked.shrink:
        print(json.dumps(campaigns.shrunk(campaign, drawn), indent=1))
        return []
    outcome = campaign.attempt(drawn, campaign.folder / "drawn")
    print(f"{outcome.result} {outcome.said}\n{campaign.folder}")
    return [] if outcome.result in campaign.GOOD else [outcome.result]


def many_draws(campaign, asked: argparse.Namespace) -> list[str]:
    from trial import campaign as campaigns

    began = time.monotonic()
    wrong = [f"the control is not found: {name}" for name in campaigns.missed(campaign)] if asked.controls else []
    numbers = campaign.numbers(asked.seed, asked.first + asked.count)[asked.first :]
    draws = [(asked.seed, number) for number in (asked.only if asked.only is not None else numbers)]
    if asked.day:
        draws += [(campaigns.today(), number) for number in campaign.numbers(campaigns.today(), asked.day)]
    draws = [draw for draw in draws if not asked.kind or campaign.kind(campaign.draw(*draw)) in asked.kind]
    jobs = asked.jobs or (min(campaign.JOBS, os.cpu_count() or 1))
    done = campaigns.tried(campaign, draws, jobs=jobs, seconds=asked.seconds)
    print(campaigns.summary(campaign, done, time.monotonic() - began))
    campaign.publish(done, asked)
    return wrong + campaigns.failures(campaign, done)


if __name__ == "__main__":
    sys.exit(main())
