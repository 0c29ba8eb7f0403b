"""Compare the planner's step times with published ones, and decoder.py's traces with the project's."""

import json
import sys

import pytest
from conftest import REPO

BENCHMARKS = REPO / "benchmarks"

JUDGE = """
import json, published
predictions = {run: published.predict(run) for run in published.read_runs()}
rows = published.make_rows(predictions, {run: published.predict_days(run) for run in predictions if run.days})
print(json.dumps({"rows": rows, "fitted": sum(run.is_fitted for run in predictions), "all": len(predictions)}))
"""

# The error at the start of the fit, and that after a step along each constant.
FIT = """
import json, fit_hardware, published
runs = [run for run in published.read_runs() if run.is_fitted]
moved = {name: fit_hardware.mean_squared_error(fit_hardware._move(fit_hardware.START, name, 0.2), runs)
         for name in fit_hardware.START}
print(json.dumps({"start": moved, "at the start": fit_hardware.mean_squared_error(fit_hardware.START, runs)}))
"""

# What a block of a network of the project adds to a traced step, and to the step that decoder.py computes for it; and
# the forward pass of what lies outside the blocks.
COMPARE = """
import json, torch
from functools import partial
from decoder import Decoder
from hpc.plan.tracer import trace_step
from my_research.models.gpt import GPT
from my_research.module import Classifier
sizes = {"num_heads": 8, "width": 512, "vocab_size": 4096, "block_size": 256}
decoder = {"width": 512, "heads": 8, "vocab": 4096, "time": 256, "rotary": True, "fused_loss": True}
optimizer = partial(torch.optim.AdamW, lr=1e-3)

def trace(layers, again):
    return trace_step(lambda: Classifier(GPT(num_layers=layers, **sizes), optimizer), "bf16", checkpointing=again)

def work_out(layers, again):
    return Decoder(layers=layers, **decoder).trace(checkpointing=again)

def flops(works): return sum(work.count * work.flops.at(4) for work in works)
def moved(works): return sum(work.count * work.bytes.at(4) for work in works if not work.flops.per_example)

def describe(make):
    known = {(layers, again): make(layers, again) for layers in (2, 3) for again in (False, True)}
    def of_block(count):
        sums = {key: [count(trace.forward), count(trace.backward)] for key, trace in known.items()}
        once, again = ([three - two for three, two in zip(sums[3, a], sums[2, a])] for a in (False, True))
        return [*once, again[1] - once[1]]
    blocks = known[2, False].blocks
    return {"parameters": [block.num_parameters for block in blocks],
            "tensors": [block.num_tensors for block in blocks],
            "flops": of_block(flops), "moved": of_block(moved),
            "head": 3 * flops(known[2, False].forward) - 2 * flops(known[3, False].forward)}

print(json.dumps([describe(trace), describe(work_out)]))
"""


@pytest.fixture(scope="module")
def answers(project, run):
    """Return the function answers(script): run it with the project and benchmarks importable, return its output."""

    def ask(script):
        environ = {"PYTHONPATH": f"{project / 'src'}:{BENCHMARKS}"}
        done = run([sys.executable, "-c", script], project, env=environ)
        assert done.returncode == 0, done.stdout
        return json.loads(done.stdout.splitlines()[-1])

    return ask


def test_predictions_reach_their_goals_on_runs_that_nothing_was_fitted_to(answers):
    found = answers(JUDGE)
    for row in found["rows"]:
        if row["goal"] is not None:
            reached = row["value"] <= row["goal"] if row["better"] == "lower" else row["value"] >= row["goal"]
            assert reached, row
    assert found["fitted"] <= 0.06 * found["all"]


def test_the_constants_can_be_fitted_again(answers):
    found = answers(FIT)
    assert len(found["start"]) > 5 and not any(value == found["at the start"] for value in found["start"].values())


@pytest.mark.slow
def test_a_decoder_that_is_worked_out_is_the_one_that_is_traced(answers):
    traced, worked_out = answers(COMPARE)
    for same in ("parameters", "tensors", "head"):
        assert traced[same] == worked_out[same], same
    assert traced["flops"] == pytest.approx(worked_out["flops"])
    assert traced["moved"] == pytest.approx(worked_out["moved"], rel=0.1)
