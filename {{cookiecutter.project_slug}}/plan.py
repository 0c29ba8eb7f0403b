"""Will it fit, how long does it take, is one more node worth it: python plan.py [group=choice] [key=value] [words]

tokens=300e9, samples=1e8     how much to train on, for the time to the end; or trainer.max_steps=
plot=FILE.png                 a picture of rate and efficiency over nodes
pipeline=8 interleaved=2 micro_batch=1    stages of a pipeline and pieces in each, to compare: train.py runs none
"""

import gc
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from hpc.config import compose, errors
from hpc.plan import plan_words, run_plan
from hpc.run import command_line


def main() -> None:
    parser = compose.make_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print the plan for programs")
    asked = parser.parse_intermixed_args(sys.argv[1:])
    own, asked.overrides = plan_words.split_words(asked.overrides)
    planned = run_plan.plan_run(command_line.compose_parsed(asked), asked.overrides, own=own)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` has read enough: no traceback
    print(run_plan.as_json(planned) if asked.json else run_plan.as_text(planned))
    if "plot" in own:
        run_plan.draw(planned, own["plot"])


if __name__ == "__main__":
    gc.disable()  # as in submit.py
    with errors.exit_on_config_error():
        main()
