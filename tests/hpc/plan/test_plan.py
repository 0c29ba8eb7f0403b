"""Check the plan: the needs of a run, the changes that make it fit, and its rejection before the queue."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typed_fixes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from hpc.config import compose, parse
from hpc.config.errors import ConfigError
from hpc.config.project import PROJECT
from hpc.jobs import hardware
from hpc.plan import fitting_changes, memory_check, plan_arguments, plan_text, prediction, run_plan, trace_cache
from hpc.plan.fitting_changes import ladder
from hpc.plan.setup import ParallelLayout, setup_from_config
from hpc.plan.trace_types import ParameterGroup, Trace
from hpc.run import changes as run_changes

A100 = hardware.machine_from_cluster("A100", 100.0)
GPT = ["model=gpt_1b", "data=stdlib", "data.block_size=1024", "data.global_batch_size=256"]
JUWELS = ["cluster=juwels_booster", "cluster.account=x"]
MODELS = {
    "gpt_tiny": ["data=stdlib"],
    "gpt_124m": ["data=stdlib", "data.block_size=1024"],
    "gpt_1b": ["data=stdlib", "data.block_size=1024"],
    "gpt_7b": ["data=stdlib", "data.block_size=1024"],
    "resnet_digits": [],
    "resnet18": ["data=packed", "data.file=x", "+data.image_size=64", "+data.num_classes=10"],
    "resnet50": ["data=packed", "data.file=x", "+data.image_size=64", "+data.num_classes=10"],
}


def composed(*words: str):
    cfg = compose.compose_overrides(words, personal=False)
    parse.parse(cfg)
    return cfg


@cache
def traced(layout: ParallelLayout) -> Trace:
    """Return the trace of one network, which does not depend on nodes and batch size."""
    return trace_cache.load_trace(composed(*GPT, "trainer=fsdp", *JUWELS), layout)


def kind(layout: ParallelLayout) -> ParallelLayout:
    alike = ParallelLayout(nodes=1, devices=4, micro_batch=1, precision=layout.precision, sharding=layout.sharding)
    return replace(alike, devices=layout.devices if layout.world_size == 1 else 4, checkpointing=layout.checkpointing)


def of(layout: ParallelLayout, machine: hardware.Machine = A100) -> prediction.Prediction:
    return prediction.predict(traced(kind(layout)), layout, machine)


def test_knows_every_shipped_model():
    from_a_folder = {"huggingface", "huggingface_lora"}
    assert set(MODELS) | from_a_folder == set(compose.config_groups()["model"])


def runs(model: str) -> list:
    """Return a config for each strategy that can train the network."""
    words = [f"model={model}", *MODELS[model], "data.global_batch_size=1920", *JUWELS]
    found = [composed(*words, "trainer=gpu")]
    for strategy in compose.config_groups()["strategy"]:
        try:
            found.append(composed(*words, "trainer=ddp_4node", f"strategy={strategy}"))
        except ConfigError:
            assert strategy == "single" or (strategy == "tensor_parallel" and model.startswith("resnet"))
    return found


@cache
def machines() -> list[hardware.Machine | None]:
    """Return each distinct machine of the shipped clusters; None stands for an unknown GPU."""
    found: list[hardware.Machine | None] = []
    for name in compose.config_groups()["cluster"]:
        cfg = composed(f"cluster={name}", "trainer=gpu")
        if (machine := memory_check.machine_from_config(cfg)) not in found:
            found.append(machine)
    return found


@pytest.mark.slow
def test_most_shipped_clusters_name_their_gpu():
    assert len(machines()) > 8 and None in machines()


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_shipped_model_with_every_strategy_on_every_cluster_is_answered(model):
    """Trace each network once per precision, then plan it on every machine."""
    asked = runs(model)
    for layout in map(setup_from_config, asked):
        trace = trace_cache.load_trace(asked[0], layout)
        for machine in machines():
            made = prediction.predict(trace, layout, machine)
            assert made.memory.total > 0
            plan = plan_text.RunPlan(made, "title", finish=None, checkpoint=None, change=None, notes=[])
            assert plan_text.as_text(plan)
            json.loads(plan_text.as_json(plan))


def layouts() -> st.SearchStrategy[ParallelLayout]:
    powers = st.sampled_from([1, 2, 4, 8])
    return st.builds(
        ParallelLayout,
        nodes=st.sampled_from([1, 2, 4, 16]),
        devices=st.sampled_from([1, 4]),
        micro_batch=powers,
        accumulate=powers,
        sharding=st.sampled_from(["none", "fsdp", "zero1", "zero2", "zero3"]),
        checkpointing=st.booleans(),
        bucket=st.just(400_000_000),
    )


@pytest.mark.soak
@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@given(layout=layouts(), gigabytes=st.floats(1, 200), more=st.floats(0, 100))
def test_more_nodes_or_memory_never_make_it_too_big(layout, gigabytes, more, precision):
    layout = replace(layout, precision=precision)
    gpu = replace(A100.gpu, memory_gb=gigabytes)
    small, large = replace(A100, gpu=gpu), replace(A100, gpu=replace(gpu, memory_gb=gigabytes + more))
    fits = prediction.fits_in_memory(traced(kind(layout)), layout, small)
    assert not fits or prediction.fits_in_memory(traced(kind(layout)), layout, large)
    twice = prediction.with_global_batch(layout, layout.global_batch, nodes=2 * layout.nodes)
    assert twice is None or not fits or prediction.fits_in_memory(traced(kind(twice)), twice, small)


@pytest.mark.slow
def test_a_plan_adds_up():
    cfg = composed(*GPT, "trainer=fsdp_4node", *JUWELS)
    made = of(setup_from_config(cfg))
    assert made.fits and made.step and made.rate and made.mfu
    assert made.rate * made.step.seconds == pytest.approx(256 * 1024)
    now = next(row for row in made.scaling if row.nodes == 4)
    assert now.gpus == 16 and now.strong and now.weak and now.strong.rate == now.weak.rate == made.rate
    assert [row.nodes for row in made.scaling] == [2**power for power in range(11)]
    assert made.scaling[-1].strong is None  # 256 samples for 4096 GPUs


@pytest.mark.slow
def test_without_facts_of_the_network_one_node_is_planned():
    made = of(ParallelLayout(nodes=4, devices=4, micro_batch=1, sharding="fsdp"), replace(A100, node_gbs=None))
    assert made.step is None and made.fits is not None and [row.nodes for row in made.scaling] == [1]


@pytest.mark.soak
@pytest.mark.slow
def test_a_change_that_fits_is_found_and_has_nothing_needless():
    words = [*GPT, "trainer=ddp_4node", *JUWELS]
    cfg = composed(*words)
    layout = setup_from_config(cfg)
    made = of(layout)
    assert made.fits is False
    change, _ = fitting_changes.find_fitting_change(cfg, words, made.trace, layout, A100)
    assert change
    typed = change.split()
    changed = setup_from_config(composed(*words, *typed))
    assert changed.global_batch == layout.global_batch and of(changed).fits
    for word in typed if len(typed) > 1 else ():
        fewer = setup_from_config(composed(*words, *(other for other in typed if other != word)))
        assert not of(fewer).fits or fewer.global_batch != layout.global_batch


@pytest.mark.slow
def test_of_the_ladder_only_what_is_needed_is_proposed(monkeypatch):
    """Check a run that fits with one rung alone, or with two, that others come before and after."""
    words = [*GPT, "trainer=ddp", "data.global_batch_size=16", *JUWELS]
    cfg = composed(*words)
    layout = setup_from_config(cfg)
    trace = Trace((ParameterGroup("block 0", 1, 1, 1, num_tensors=1, buffer_bytes=0),), "tokens", 1024)

    def fits(trace, changed, machine):
        return all(getattr(changed, name) == value for name, value in needed.items())

    monkeypatch.setattr(trace_cache, "load_trace", lambda cfg, setup: trace)
    monkeypatch.setattr(fitting_changes, "fits_in_memory", fits)

    def proposed() -> str | None:
        return fitting_changes.find_fitting_change(cfg, words, trace, layout, A100)[0]

    needed = {"checkpointing": True}
    assert proposed() == "strategy.activation_checkpointing=true"
    needed = {"sharding": "fsdp", "accumulate": 4}
    assert proposed() == "strategy=fsdp trainer.accumulate_grad_batches=4"
    needed = {"nodes": 4, "checkpointing": True}
    assert proposed() == "strategy.activation_checkpointing=true trainer.num_nodes=4"
    cfg.cluster.scheduler = None  # nothing could start ranks on other nodes
    assert proposed() is None


@pytest.mark.slow
def test_what_cannot_fit_is_rejected_with_a_way_out():
    words = [*GPT, "trainer=ddp", *JUWELS]
    with pytest.raises(ConfigError, match=r"(?s)A100 has 42.3 GB.*force=true") as rejected:
        memory_check.reject_too_big(composed(*words), words)
    way = rejected.value.fix.split(";")[0]
    memory_check.reject_too_big(composed(*words, *way.split()), [*words, *way.split()])
    memory_check.reject_too_big(composed(*words, "force=true"), words)
    for word in ["force=true", *rejected.value.fix.replace(";", "").replace(" or ", " ").split()]:
        if "=" in word:  # a resumed run gets the same proposal, so the override must be permitted there
            assert word.partition("=")[0].split(".")[0] in run_changes.MAY_CHANGE


def test_what_cannot_be_traced_is_submitted_with_a_warning(monkeypatch, capsys):
    def no_trace(cfg, setup):
        raise trace_cache.TracingError("aten._local_scalar_dense in block 0")

    monkeypatch.setattr(trace_cache, "load_trace", no_trace)
    memory_check.reject_too_big(composed(*GPT, "trainer=ddp", *JUWELS), [])
    warning = capsys.readouterr().err
    assert "cannot check whether the run fits" in warning and "_local_scalar_dense in block 0" in warning


def by_parameters(num_parameters: int) -> Trace:
    """Return the trace of a module whose step could not be traced."""
    group = ParameterGroup("all", num_parameters, num_parameters, num_parameters, num_tensors=1, buffer_bytes=0)
    return Trace((group,), "samples", 1, by_parameters="net.py:3, `x.item()`: it needs the value of a tensor")


@pytest.mark.slow
def test_a_plan_by_parameters_alone_is_marked(monkeypatch, capsys):
    cfg = composed(*GPT, "trainer=ddp", *JUWELS)
    monkeypatch.setattr(trace_cache, "load_trace", lambda cfg, setup: by_parameters(10**9))
    memory_check.reject_too_big(cfg, [])
    said = "planned by parameters alone: net.py:3, `x.item()`: it needs the value of a tensor; activations are not"
    assert said in capsys.readouterr().err
    plan = run_plan.plan_run(cfg, [])
    text = plan_text.as_text(plan)
    assert said in text and "activations   not counted" in text and "fits" not in text
    assert "left for activations" in text and "a step:" not in text and "nodes   GPUs" not in text
    told = json.loads(plan_text.as_json(plan))
    assert told["fits"] is None and told["memory"]["activations"] is None and told["step"]["seconds"] is None
    assert "x.item()" in told["by_parameters"]
    monkeypatch.setattr(trace_cache, "load_trace", lambda cfg, setup: by_parameters(10**10))
    with pytest.raises(ConfigError, match=r"needs 1\d\d.\d GB at its peak, without activations"):
        memory_check.reject_too_big(cfg, [])


@pytest.mark.slow
def test_the_batch_size_may_be_the_loaders():
    layout = ParallelLayout(nodes=1, devices=4, micro_batch=0)
    assert prediction.with_loader_batch(layout, replace(traced(kind(layout)), loader_batch_size=6)).micro_batch == 6
    with pytest.raises(ConfigError, match=r"data.batch_size must be given for a plan"):
        prediction.with_loader_batch(layout, traced(kind(layout)))


def measured_run(folder: Path, **changed: Any) -> Path:
    """Write what tools/comm.py leaves in a run of four nodes with four GPUs each."""
    link = {"gbs": 20.0, "latency": 1e-5, "ranks": 4, "nodes": ["n1"], "date": "2026-01-31"}
    report = {"backend": "nccl", "ranks_per_node": 4, "links": {"within": None, "across": link}} | changed
    (folder / "network.json").write_text(json.dumps(report))
    return folder


def test_a_named_measurement_of_the_network_takes_the_place_of_nominal_bandwidths(tmp_path):
    """Check the bandwidths of a run of tools/comm.py: four rings of 20 GB/s leave a node at once."""
    across = plan_arguments.with_measured_network(A100, measured_run(tmp_path))
    assert across.node_gbs == pytest.approx(80 / A100.network.node_share) and across.gpu == A100.gpu
    links = {"within": {"gbs": 20.0}, "across": None}
    within = plan_arguments.with_measured_network(A100, measured_run(tmp_path, links=links))
    assert within.gpu.link_gbs == pytest.approx(20 / A100.network.link_share) and within.node_gbs == 100


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (None, "must be a run of tools/comm.py: cannot read .*network.json: No such file"),
        ({"backend": "gloo"}, "must be a run on GPUs: network.json has links of gloo"),
        ({"links": {"within": None, "across": None}}, "network.json has no link"),
        ({"links": {"within": {"gbs": float("nan")}, "across": None}}, "network.json in it is damaged"),
        ({"links": []}, "network.json in it is damaged"),
        ({"ranks_per_node": 0}, "network.json in it is damaged"),
    ],
)
def test_a_run_without_a_measurement_is_rejected(changed, said, tmp_path):
    if changed is not None:
        measured_run(tmp_path, **changed)
    with pytest.raises(ConfigError, match=said):
        plan_arguments.with_measured_network(A100, tmp_path)


def test_a_gpu_that_nobody_knows_is_rejected():
    with pytest.raises(ConfigError, match=r"(?s)cluster.gpu must be .*got H1000.*cluster.gpu=H100"):
        cfg = composed("trainer=ddp", *JUWELS, "cluster.gpu=H1000", "data.global_batch_size=64")
        memory_check.machine_from_config(cfg)


def plan_py(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, PROJECT / "plan.py", *words], capture_output=True, text=True, timeout=300)


def step_line(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("a step: "))


@pytest.mark.slow
def test_the_command(tmp_path):
    done = plan_py(*GPT, "trainer=fsdp_4node", *JUWELS, "tokens=1e9")
    assert done.returncode == 0, done.stderr
    for word in ("memory of a GPU", "fits", "tokens/s", "MFU", "GPU-hours", "a checkpoint", "1024"):
        assert word in done.stdout
    assert len(done.stdout.splitlines()) <= 45 and max(map(len, done.stdout.splitlines())) <= 120
    slow = plan_py(*GPT, "trainer=fsdp_4node", *JUWELS, "tokens=1e9", f"network={measured_run(tmp_path)}")
    assert slow.returncode == 0 and step_line(slow.stdout) != step_line(done.stdout)
    told = json.loads(plan_py(*GPT, "trainer=fsdp_4node", *JUWELS, "--json").stdout)
    assert told["fits"] is True and told["finish"] is None and told["unit"] == "tokens"
    held = {name: size for name, size in told["memory"].items() if name not in ("total", "room", "margin")}
    assert sum(held.values()) == pytest.approx(told["memory"]["total"])
    assert told["setup"]["nodes"] == 4 and told["setup"]["global_batch"] == 256


@pytest.mark.slow
def test_idle_gpus_of_a_whole_node_are_paid_for():
    words = [*GPT, "trainer=gpu", *JUWELS, "tokens=1e8", "--json"]
    hours = [
        json.loads(plan_py(*words, f"cluster.whole_nodes={value}").stdout)["finish"]["gpu_hours"]
        for value in ("false", "true")
    ]
    assert hours[1] == pytest.approx(4 * hours[0])


@pytest.mark.slow
def test_a_plan_imports_no_torch():
    code = "import runpy, sys; runpy.run_path('plan.py', run_name='__main__'); print(*sys.modules)"
    command = [sys.executable, "-c", code, "trainer=ddp_4node", "cluster=slurm"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.splitlines()[-1].split())
    assert "hpc.plan.plan_text" in modules and not {"torch", "lightning"} & modules


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tokens=0"], "must be a number above 0"),
        (["tokens=nan"], "must be a number above 0"),
        (["tokens=1e400"], "must be a number above 0"),
        (["tokens=1e9", "samples=5"], "samples cannot be combined with tokens=1e+09; got 5."),
        (["tokens=1e9", "trainer.max_steps=5"], "tokens cannot be combined with trainer.max_steps=5; got 1e+09."),
        (["network=/no/run"], "network must be a run of tools/comm.py: cannot read /no/run/network.json"),
        (["data.global_batch_size=0"], "at least 1"),
        (["model.network.width=-8"], "at least 1"),
        (["model.network.num_layers=0"], "at least 1"),
        (["cluster.gpu=A1000"], "hpc/jobs/hardware.yaml"),
        (["cluster.gpu='a100 pcie'"], "hpc/jobs/hardware.yaml"),  # another name is another GPU
        (["cluster.network_gbs=0"], "number above 0"),
        (["cluster.gpu_link_gbs=nan"], "number above 0"),
    ],
)
def test_bad_input_gets_one_message(words, said):
    done = plan_py(*GPT, "trainer=fsdp_4node", *JUWELS, *words)
    assert done.returncode == 2 and done.stderr.startswith(("ConfigError: ", "tracing")), done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr

    def type_again(accepted):
        again = plan_py(*GPT, "trainer=fsdp_4node", *JUWELS, *accepted)
        if again.returncode:
            raise typed_fixes.printed(again.stderr)

    typed_fixes.follow(type_again, words, typed_fixes.printed(done.stderr))


@pytest.mark.slow
def test_the_model_alone_is_enough():
    """Plan a GPT without a choice of data; the model's file brings its own."""
    told = json.loads(plan_py("trainer=fsdp_4node", "model=gpt_7b", "cluster=juwels_booster", "--json").stdout)
    assert told["unit"] == "tokens" and told["parameters"] == 6_443_765_760


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data=images"], "data.num_classes must be given for a plan without data.dir."),
        (["data=images", "data.dir=/nowhere"], "data.dir must be an existing folder; got /nowhere."),
        (["data=packed"], "data.num_classes, data.image_size must be given for a plan without data.file."),
        (["data=images", "data.num_classes=1000", "model.optimizer.lrr=1"], "model.optimizer.lrr must be an argument"),
    ],
)
def test_a_size_that_nobody_gives_is_asked_for(words, said):
    with pytest.raises(ConfigError) as caught:
        cfg = compose.compose_overrides(["model=resnet50", *words])
        run_plan.plan_run(cfg, words)
    assert str(caught.value).startswith(said)

    def type_again(accepted):
        run_plan.plan_run(compose.compose_overrides(["model=resnet50", *accepted]), accepted)

    typed_fixes.follow(type_again, words, caught.value)


@pytest.mark.slow
def test_sizes_in_the_config_are_enough_for_a_plan():
    words = ["model=resnet18", "data=images", "data.num_classes=1000"]
    plan = run_plan.plan_run(compose.compose_overrides(words), words)
    assert plan.prediction.trace.num_parameters == 11_689_512 and plan.finish is None
    assert "planned without data.dir; it uses data.num_classes=1000, data.image_size=224" in plan.notes
    words.append("data.dir=/nowhere")  # which a plan need not read either
    assert run_plan.plan_run(compose.compose_overrides(words), words).prediction.trace == plan.prediction.trace


@pytest.mark.soak
def test_tensor_parallel_ranks_count_what_they_all_keep_once():
    layout = setup_from_config(composed(*GPT, "trainer=fsdp_4node", "strategy=tensor_parallel", *JUWELS))
    assert layout.tensor_parallel > 1
    cfg = composed(*GPT, *JUWELS, "trainer=fsdp")
    alone, shared = (trace_cache.load_trace(cfg, one) for one in (replace(layout, tensor_parallel=1), layout))
    assert shared.num_parameters == alone.num_parameters
    assert shared.num_parameters_per_rank > alone.num_parameters / layout.tensor_parallel


@pytest.mark.slow
def test_margin_and_verdict_agree():
    layout = setup_from_config(composed(*GPT, "trainer=fsdp_4node", *JUWELS))
    total = of(layout).memory.total
    for gigabytes in (total / 1e9, total / 1e9 / (1 - prediction.SPARE_SHARE) + 0.01):
        made = of(layout, replace(A100, gpu=replace(A100.gpu, memory_gb=gigabytes)))
        assert made.margin is not None and made.fits is (made.margin >= 0)


@pytest.mark.slow
def test_nodes_that_are_asked_for_are_in_the_table_and_one_device_has_no_more():
    three = of(ParallelLayout(nodes=3, devices=4, micro_batch=1, sharding="fsdp"))
    assert 3 in [row.nodes for row in three.scaling]
    alone = of(ParallelLayout(nodes=1, devices=1, micro_batch=1, single=True))
    assert [row.nodes for row in alone.scaling] == [1]


@pytest.mark.soak
@pytest.mark.slow
def test_without_a_way_out_it_says_so():
    words = ["model=gpt_7b", "data.global_batch_size=1", "data.block_size=65536", "trainer=gpu"]
    done = plan_py(*words, "cluster=juwels_booster")
    assert done.returncode == 0 and fitting_changes.NO_CHANGE_FITS in done.stdout, done.stdout + done.stderr


def test_the_ladder_goes_from_what_costs_nothing_to_what_changes_results():
    layout = ParallelLayout(nodes=2, devices=4, micro_batch=4, precision="bf16-mixed")
    rungs = list(ladder(layout, has_blocks=True, batch_key="data.global_batch_size", max_nodes=8))
    assert [" ".join(f"{key}={value}" for key, value in rung.items()) for rung in rungs] == [
        "strategy=fsdp",
        "trainer.accumulate_grad_batches=2",
        "trainer.accumulate_grad_batches=4",
        "strategy.activation_checkpointing=true",
        "trainer.num_nodes=4 trainer.accumulate_grad_batches=2",
        "trainer.num_nodes=8 trainer.accumulate_grad_batches=1",  # and the cluster has no more
        "strategy=zero3_offload",
        "trainer.precision=bf16-true",
    ]
    has_no_blocks = ladder(layout, has_blocks=False, batch_key=None)
    assert [key for rung in has_no_blocks for key in rung] == ["strategy", "strategy", "trainer.precision"]
    split = ladder(replace(layout, tensor_parallel=2), has_blocks=True, batch_key=None)
    assert not any("strategy" in rung for rung in split)


def test_one_device_is_offered_a_node_and_four():
    layout = ParallelLayout(nodes=1, devices=1, micro_batch=64, precision="bf16-mixed", single=True)
    rungs = list(ladder(layout, has_blocks=True, batch_key="data.global_batch_size", devices=4))
    assert {"trainer": "fsdp", "trainer.accumulate_grad_batches": "16"} in rungs
    assert {"trainer": "fsdp_4node", "trainer.accumulate_grad_batches": "4"} in rungs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "steps", "said"),
    [
        ({}, None, "to predict the time to the end, add"),
        ({}, 10, "is too short for a single step"),  # finish is None
        ({"offload": True, "sharding": "zero3"}, None, "takes longer than predicted"),
        ({"compile": True, "micro_batch": 64}, None, "torch.compile saves less"),
        ({"accelerated": False}, None, "this run uses CPUs"),
    ],
)
def test_what_a_plan_does_not_know_is_noted(changed, steps, said):
    cluster = OmegaConf.create({"name": "c", "network_gbs": 100, "time": "0:02:15"})
    layout = replace(ParallelLayout(nodes=4, devices=4, micro_batch=1), **changed)
    made = prediction.predict(traced(kind(layout)), layout, A100)
    notes = plan_text.notes(made, cluster, steps=steps, finish=None)
    assert any(said in note for note in notes)
    unknown = replace(made, trace=replace(made.trace, optimizer_states=None))
    assert any("counted as AdamW" in note for note in plan_text.notes(unknown, cluster, steps=steps, finish=None))


@pytest.mark.slow
def test_who_reads_only_the_first_line_sees_no_traceback():
    words = [sys.executable, str(PROJECT / "plan.py"), *GPT, "trainer=fsdp_4node", *JUWELS]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        done = subprocess.run(words, stdout=nobody, stderr=subprocess.PIPE, text=True, timeout=300)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.parametrize("key", ["data.global_batch_size", "data.batch_size", None])
def test_each_rung_keeps_the_global_batch_whoever_gives_it(key):
    """Check that a batch of a device is halved where accumulated batches double, and that a loader's stays."""
    layout = ParallelLayout(nodes=2, devices=4, micro_batch=4, precision="bf16-mixed")
    typed: dict[str, str] = {}
    for rung in ladder(layout, has_blocks=True, batch_key=key):
        typed |= rung
        nodes = int(typed.get("trainer.num_nodes", layout.nodes))
        accumulate = int(typed.get("trainer.accumulate_grad_batches", layout.accumulate))
        micro_batch = int(typed.get("data.batch_size", layout.micro_batch))
        if key == "data.global_batch_size":
            assert layout.global_batch % (nodes * layout.devices * accumulate) == 0 and "data.batch_size" not in typed
        else:
            assert nodes * layout.devices * accumulate * micro_batch == layout.global_batch
    assert ("trainer.accumulate_grad_batches" in typed) == ("trainer.num_nodes" in typed) == (key is not None)


@pytest.fixture
def loader_decides():
    """Return the overrides of data whose loaders decide about the batch size."""
    source, config = PROJECT / "src/loader_decides.py", PROJECT / "configs/data/loader_decides.yaml"
    sizes = {"block_size": 1024, "vocab_size": 96, "bytes_per_token": 1.0}
    arguments = ", ".join(f"{name}={value}" for name, value in sizes.items())
    source.write_text(
        "import lightning as L\n\n\nclass Data(L.LightningDataModule):\n"
        f"    def __init__(self, {arguments}):\n        super().__init__()\n"
    )
    config.write_text(json.dumps({"_target_": "loader_decides.Data", **sizes}))
    yield ["model=gpt_1b", "data=loader_decides"]
    source.unlink()
    config.unlink()


def test_a_plan_by_parameters_of_a_loaders_batch_has_ways_out(monkeypatch, loader_decides):
    """Check a network whose step cannot be traced: the batch is unknown, but strategies that shard it are proposed."""
    words = [*loader_decides, "trainer=ddp_4node", *JUWELS]
    cfg = composed(*words)
    trace = by_parameters(7 * 10**9)
    monkeypatch.setattr(trace_cache, "load_trace", lambda cfg, setup: trace)
    made = prediction.predict(trace, setup_from_config(cfg), A100)
    assert made.fits is False and made.setup.micro_batch == 0
    change, _ = fitting_changes.find_fitting_change(cfg, words, trace, made.setup, A100)
    assert change == "strategy=fsdp"


@pytest.mark.slow
@pytest.mark.parametrize("error", [None, trace_cache.TracingError("no module named x")])
def test_where_no_change_is_known_the_reason_is_told(monkeypatch, error, loader_decides):
    words = [*loader_decides, "trainer=ddp", *JUWELS]
    cfg = composed(*words)

    def load(cfg, setup):
        if error:
            raise error
        return huge

    huge = replace(of(ParallelLayout(nodes=1, devices=1, micro_batch=1)).trace, loader_batch_size=10**6)
    monkeypatch.setattr(trace_cache, "load_trace", load)
    made = prediction.predict(huge, setup_from_config(cfg), A100)
    change, sentence = fitting_changes.find_fitting_change(cfg, words, huge, made.setup, A100)
    assert not change and ("no module named x" in sentence if error else "your loader" in sentence)


@pytest.mark.slow
@pytest.mark.parametrize(("memory_gb", "fits"), [(None, None), (10, False), (500, True)])
def test_what_is_offloaded_must_fit_into_the_node(memory_gb, fits):
    """Check ZeRO's offload of a network of a billion parameters: 16 bytes each, of four ranks on one node."""
    layout = ParallelLayout(nodes=1, devices=4, micro_batch=1, sharding="zero3", precision="bf16-mixed", offload=True)
    made = of(layout, replace(A100, node_memory_gb=memory_gb))
    assert made.margin > 0 and made.fits is fits
    assert prediction.fits_in_memory(made.trace, layout, replace(A100, node_memory_gb=memory_gb)) is (fits is True)
