"""Check the plan: the needs of a run, the changes that make it fit, and its rejection before the queue."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
import typed_fixes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from hpc.config import compose, parse
from hpc.config.errors import ConfigError
from hpc.config.project import PROJECT
from hpc.jobs import hardware
from hpc.launch import measured_links
from hpc.plan import memory_check, plan_text, prediction, run_plan, scaling_plot, trace_cache
from hpc.plan.fitting_changes import list_candidates
from hpc.plan.setup import ParallelLayout, setup_from_config
from hpc.plan.trace_types import BatchCost, Part, Trace
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
    return trace_cache.load_traces(composed(*GPT, "trainer=fsdp", *JUWELS), [layout])[0]


def kind(layout: ParallelLayout) -> ParallelLayout:
    alike = ParallelLayout(nodes=1, devices=4, micro_batch=1, precision=layout.precision, sharding=layout.sharding)
    return replace(alike, devices=layout.devices if layout.world_size == 1 else 4)


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
    layouts = [setup_from_config(cfg) for cfg in asked]
    nothing = {"finish": None, "checkpoint": None, "changes": [], "notes": []}
    for layout, trace in zip(layouts, trace_cache.load_traces(asked[0], layouts), strict=True):
        for machine in machines():
            made = prediction.predict(trace, layout, machine)
            assert made.memory.total > 0
            assert plan_text.lines(made, "title", **nothing)
            json.dumps(plan_text.as_dict(made, **nothing))
            scaling_plot.scaling_charts(made)


def layouts() -> st.SearchStrategy[ParallelLayout]:
    powers = st.sampled_from([1, 2, 4, 8])
    return st.builds(
        ParallelLayout,
        nodes=st.sampled_from([1, 2, 4, 16]),
        devices=st.sampled_from([1, 4]),
        micro_batch=powers,
        accumulate=powers,
        sharding=st.sampled_from(["none", "fsdp", "zero1", "zero2", "zero3"]),
        precision=st.sampled_from(["32-true", "bf16-mixed", "bf16-true"]),
        checkpointing=st.booleans(),
        bucket=st.just(400_000_000),
    )


@pytest.mark.soak
@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(layout=layouts(), gigabytes=st.floats(1, 200), more=st.floats(0, 100))
def test_more_nodes_or_memory_never_make_it_too_big(layout, gigabytes, more):
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
def test_the_smallest_changes_that_fit_are_found():
    """Check that each proposed change fits, and that no smaller one does."""
    words = [*GPT, "trainer=ddp_4node", *JUWELS]
    cfg = composed(*words)
    layout = setup_from_config(cfg)
    made = of(layout)
    assert made.fits is False
    ways, _ = memory_check.find_fitting_changes(cfg, words, made)
    assert ways
    for way in map(str.split, ways):
        changed = setup_from_config(composed(*words, *way))
        assert changed.global_batch == layout.global_batch
        assert of(changed).fits
        for word in way if len(way) > 1 else ():
            assert not of(setup_from_config(composed(*words, word))).fits


def test_candidates_keep_the_global_batch_and_come_few_first():
    layout = ParallelLayout(nodes=2, devices=4, micro_batch=4, precision="bf16-mixed")
    found = list(list_candidates(layout, has_blocks=True, max_nodes=8))
    assert {candidate.setup.global_batch for candidate in found} == {32}
    numbers = [len(candidate.overrides) for candidate in found]
    assert numbers == sorted(numbers) and set(numbers) == {1, 2, 3}
    assert ("trainer.num_nodes=16",) not in {candidate.overrides for candidate in found}  # the cluster has 8


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
    def no_trace(cfg, setups):
        raise trace_cache.TracingError("aten._local_scalar_dense in block 0")

    monkeypatch.setattr(trace_cache, "load_traces", no_trace)
    memory_check.reject_too_big(composed(*GPT, "trainer=ddp", *JUWELS), [])
    warning = capsys.readouterr().err
    assert "cannot check whether the run fits" in warning and "_local_scalar_dense in block 0" in warning


def by_parameters(num_parameters: int) -> Trace:
    """Return the trace of a module whose step could not be traced."""
    part = Part(
        name="before", num_parameters=num_parameters, num_trained_per_rank=num_parameters,
        num_parameters_all_ranks=num_parameters, num_tensors=1, buffer_bytes=0, saved=BatchCost(), output=BatchCost(),
        forward_peak=(BatchCost(),), backward_peak=(BatchCost(),), leftover=BatchCost(), forward=(), backward=(),
        all_reduced=(),
    )  # fmt: skip
    return Trace((part,), "samples", 1, by_parameters="net.py:3, `x.item()`: it needs the value of a tensor")


def test_a_plan_by_parameters_alone_is_marked(monkeypatch, capsys):
    cfg = composed(*GPT, "trainer=ddp", *JUWELS)
    monkeypatch.setattr(trace_cache, "load_traces", lambda cfg, setups: [by_parameters(10**9) for _ in setups])
    memory_check.reject_too_big(cfg, [])
    said = "planned by parameters alone: net.py:3, `x.item()`: it needs the value of a tensor; activations are not"
    assert said in capsys.readouterr().err
    plan = run_plan.plan_run(cfg, [], own={})
    text = run_plan.as_text(plan)
    assert said in text and "activations   not counted" in text and "fits" not in text
    assert "left for activations" in text and "a step:" not in text and "nodes   GPUs" not in text
    told = json.loads(run_plan.as_json(plan))
    assert told["fits"] is None and told["memory"]["activations"] is None and told["step"]["seconds"] is None
    assert "x.item()" in told["by_parameters"]
    monkeypatch.setattr(trace_cache, "load_traces", lambda cfg, setups: [by_parameters(10**10) for _ in setups])
    with pytest.raises(ConfigError, match=r"needs 1\d\d.\d GB at its peak, without activations"):
        memory_check.reject_too_big(cfg, [])


def test_the_batch_size_may_be_the_loaders():
    layout = ParallelLayout(nodes=1, devices=4, micro_batch=0)
    assert prediction.with_loader_batch(layout, replace(traced(kind(layout)), loader_batch_size=6)).micro_batch == 6
    with pytest.raises(ConfigError, match=r"data.batch_size must be given for a plan"):
        prediction.with_loader_batch(layout, traced(kind(layout)))


def test_a_measured_network_counts_for_more_than_a_nominal_one():
    """Check that a measured bandwidth takes precedence over the nominal one.

    Four rings of 20 GB/s leave a node at once.
    """
    link = measured_links.Link(gbs=20.0, latency=1e-5, ranks=4, nodes=["n1"], date="2026-01-31")
    known = memory_check.with_measured_links(A100, measured_links.MeasuredLinks(within=None, across=link), devices=4)
    assert known.node_gbs == pytest.approx(80 / A100.network.node_share) and known.gpu == A100.gpu
    inside = memory_check.with_measured_links(A100, measured_links.MeasuredLinks(within=link, across=None), devices=4)
    assert inside.gpu.link_gbs == pytest.approx(20 / A100.network.link_share) and inside.node_gbs == 100
    assert memory_check.with_measured_links(A100, None, devices=4) == A100


def test_a_gpu_that_nobody_knows_is_rejected():
    with pytest.raises(ConfigError, match=r"(?s)cluster.gpu must be .*got H1000.*cluster.gpu=H100"):
        cfg = composed("trainer=ddp", *JUWELS, "cluster.gpu=H1000", "data.global_batch_size=64")
        memory_check.machine_from_config(cfg)


def plan_py(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, PROJECT / "plan.py", *words], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_command(tmp_path):
    picture = tmp_path / "build" / "plan.html"
    done = plan_py(*GPT, "trainer=fsdp_4node", *JUWELS, "tokens=1e9", f"plot={picture}")
    assert done.returncode == 0, done.stderr
    for word in ("memory of a GPU", "fits", "tokens/s", "MFU", "GPU-hours", "a checkpoint", "1024"):
        assert word in done.stdout
    assert len(done.stdout.splitlines()) <= 45 and max(map(len, done.stdout.splitlines())) <= 120
    assert picture.read_text().count("<figure>") == 2
    told = json.loads(plan_py(*GPT, "trainer=fsdp_4node", *JUWELS, "--json").stdout)
    assert told["fits"] is True and told["finish"] is None and told["unit"] == "tokens"
    held = {name: size for name, size in told["memory"].items() if name not in ("total", "room", "margin")}
    assert sum(held.values()) == pytest.approx(told["memory"]["total"])
    assert told["setup"]["nodes"] == 4 and told["setup"]["global_batch"] == 256


def test_a_plan_in_text_imports_nothing_that_draws():
    code = "import runpy, sys; runpy.run_path('plan.py', run_name='__main__'); print(*sys.modules)"
    command = [sys.executable, "-c", code, "trainer=ddp_4node", "cluster=slurm"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.splitlines()[-1].split())
    assert "hpc.plan.plan_text" in modules and not {"hpc.charts.chart", "hpc.plan.scaling_plot"} & modules


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tokens=0"], "must be a number above 0"),
        (["tokens=nan"], "must be a number above 0"),
        (["tokens=1e400"], "must be a number above 0"),
        (["tokens=1e9", "samples=5"], "samples cannot be combined with tokens=1e+09; got 5."),
        (["tokens=1e9", "trainer.max_steps=5"], "tokens cannot be combined with trainer.max_steps=5; got 1e+09."),
        (["pipeline=two"], "must be a whole number above 0"),
        (
            ["pipeline=3"],
            "pipeline=3: pipeline * strategy.tensor_parallel_size (3 * 1) must divide the world size (16).",
        ),
        (
            ["pipeline=16", "model.network.num_layers=7", "micro_batch=1"],
            "pipeline must split the 7 blocks of the network evenly",
        ),
        (["interleaved=2"], "interleaved must come with pipeline="),
        (["micro_batch=7"], "micro_batch must divide the batch of a data-parallel rank (256 / 16); got 7."),
        (["data.global_batch_size=0"], "at least 1"),
        (["model.network.width=-8"], "at least 1"),
        (["model.network.num_layers=0"], "at least 1"),
        (["cluster.gpu=A1000"], "hpc/jobs/hardware.yaml"),
        (["cluster.gpu='a100 pcie'"], "hpc/jobs/hardware.yaml"),  # another name is another GPU
        (["cluster.network_gbs=0"], "number above 0"),
        (["cluster.gpu_link_gbs=nan"], "number above 0"),
        (["plot=/proc/no/plan.html"], "Cannot make the folder of this file"),
        (["plot=plan.png"], "must be the name of a file that ends in .html"),
    ],
)
def test_bad_input_gets_one_message(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a fix that is typed draws its plan
    done = plan_py(*GPT, "trainer=fsdp_4node", *JUWELS, *words)
    assert done.returncode == 2 and done.stderr.startswith(("ConfigError: ", "tracing")), done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr

    def type_again(accepted):
        again = plan_py(*GPT, "trainer=fsdp_4node", *JUWELS, *accepted)
        if again.returncode:
            raise typed_fixes.printed(again.stderr)

    typed_fixes.follow(type_again, words, typed_fixes.printed(done.stderr))


@pytest.mark.soak
@pytest.mark.slow
def test_a_pipeline_is_planned_and_said_not_to_run():
    words = ["trainer=fsdp_4node", "strategy=tensor_parallel", "pipeline=4", "interleaved=2", "micro_batch=4"]
    done = plan_py(*GPT, *JUWELS, *words)
    assert done.returncode == 0, done.stderr
    assert "train.py has no pipeline" in done.stdout and "bubble" in done.stdout


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
        run_plan.plan_run(cfg, words, own={})
    assert str(caught.value).startswith(said)

    def type_again(accepted):
        run_plan.plan_run(compose.compose_overrides(["model=resnet50", *accepted]), accepted, own={})

    typed_fixes.follow(type_again, words, caught.value)


def test_sizes_in_the_config_are_enough_for_a_plan():
    words = ["model=resnet18", "data=images", "data.num_classes=1000"]
    plan = run_plan.plan_run(compose.compose_overrides(words), words, own={})
    assert plan.prediction.trace.num_parameters == 11_689_512 and plan.finish is None
    assert "planned without data.dir; it uses data.num_classes=1000, data.image_size=224" in plan.notes
    words.append("data.dir=/nowhere")  # which a plan need not read either
    assert run_plan.plan_run(compose.compose_overrides(words), words, own={}).prediction.trace == plan.prediction.trace


@pytest.mark.soak
def test_tensor_parallel_ranks_count_what_they_all_keep_once():
    layout = setup_from_config(composed(*GPT, "trainer=fsdp_4node", "strategy=tensor_parallel", *JUWELS))
    assert layout.tensor_parallel > 1
    alone, shared = (trace_cache.load_traces(composed(*GPT, *JUWELS, "trainer=fsdp"), [one])[0] for one in (
        replace(layout, tensor_parallel=1), layout
    ))  # fmt: skip
    assert shared.num_parameters == alone.num_parameters
    assert sum(part.num_parameters for part in shared.parts) > alone.num_parameters / layout.tensor_parallel


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
    assert done.returncode == 0 and memory_check.NO_CHANGE_FITS in done.stdout, done.stdout + done.stderr


def test_offloading_comes_after_what_costs_less():
    layout = ParallelLayout(nodes=1, devices=4, micro_batch=4, precision="bf16-mixed")
    alone = [
        candidate.overrides[0]
        for candidate in list_candidates(layout, has_blocks=True)
        if len(candidate.overrides) == 1
    ]
    assert alone.index("strategy=zero3_offload") > alone.index("strategy.activation_checkpointing=true")
    typed = [" ".join(candidate.overrides) for candidate in list_candidates(layout, has_blocks=True)]
    assert not any(words.count("strategy=") > 1 for words in typed)


def test_one_device_is_offered_a_node_and_four():
    layout = ParallelLayout(nodes=1, devices=1, micro_batch=64, precision="bf16-mixed", single=True)
    words = {word for candidate in list_candidates(layout, has_blocks=True, devices=4) for word in candidate.overrides}
    assert {"trainer=fsdp", "trainer=fsdp_4node"} <= words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "steps", "said"),
    [
        ({}, None, "to predict the time to the end, add"),
        ({}, 10, "is too short for a single step"),  # finish is None
        ({"offload": True, "sharding": "zero3"}, None, "takes longer than predicted"),
        ({"pipeline": 2}, None, "train.py has no pipeline"),
        ({"compile": True, "micro_batch": 64}, None, "torch.compile saves less"),
        ({"accelerated": False}, None, "this run uses CPUs"),
    ],
)
def test_what_a_plan_does_not_know_is_noted(changed, steps, said):
    cluster = OmegaConf.create({"name": "c", "network_gbs": 100, "max_nodes": 256, "time": "0:02:15"})
    layout = replace(ParallelLayout(nodes=4, devices=4, micro_batch=1), **changed)
    made = prediction.predict(traced(kind(layout)), layout, A100)
    notes = plan_text.notes(made, cluster, steps=steps, finish=None)
    assert any(said in note for note in notes) and "cluster=c allows at most 256 nodes" in notes
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
def test_a_proposed_change_keeps_the_global_batch_whoever_gives_it(key):
    """Check that a batch of a device is halved where ranks or accumulated batches double, and that a loader's stays."""
    layout = ParallelLayout(nodes=2, devices=4, micro_batch=4, precision="bf16-mixed")
    found = list(list_candidates(layout, has_blocks=True, batch_key=key))
    for candidate in found:
        typed = dict(word.split("=") for word in candidate.overrides)
        nodes = int(typed.get("trainer.num_nodes", layout.nodes))
        accumulate = int(typed.get("trainer.accumulate_grad_batches", layout.accumulate))
        micro_batch = int(typed.get("data.batch_size", layout.micro_batch))
        if key == "data.global_batch_size":
            assert candidate.setup.global_batch == layout.global_batch and "data.batch_size" not in typed
        else:
            assert nodes * layout.devices * accumulate * micro_batch == layout.global_batch
    assert any("accumulate" in word for candidate in found for word in candidate.overrides) == (key is not None)
    assert any("strategy=fsdp" in candidate.overrides for candidate in found)


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
    sizes = {"num_parameters": 7 * 10**9, "num_trained_per_rank": 7 * 10**9, "num_parameters_all_ranks": 7 * 10**9}
    empty = {"buffer_bytes": 0, "num_tensors": 1, "forward": (), "backward": (), "all_reduced": ()}
    empty |= dict.fromkeys(("saved", "output", "leftover"), BatchCost())
    part = Part(name="before", forward_peak=(BatchCost(),), backward_peak=(BatchCost(),), **sizes, **empty)
    trace = Trace((part,), "samples", 1, by_parameters="it reads a value")
    monkeypatch.setattr(trace_cache, "load_traces", lambda cfg, setups: [trace] * len(setups))
    made = prediction.predict(trace, setup_from_config(cfg), A100)
    assert made.fits is False and made.setup.micro_batch == 0
    changes, _ = memory_check.find_fitting_changes(cfg, words, made)
    assert changes and not any("accumulate" in change or "num_nodes" in change for change in changes)


@pytest.mark.parametrize("error", [None, trace_cache.TracingError("no module named x")])
def test_where_no_change_is_known_the_reason_is_told(monkeypatch, error, loader_decides):
    words = [*loader_decides, "trainer=ddp", *JUWELS]
    cfg = composed(*words)

    def load(cfg, setups):
        if error:
            raise error
        return [huge] * len(setups)

    huge = replace(of(ParallelLayout(nodes=1, devices=1, micro_batch=1)).trace, loader_batch_size=10**6)
    monkeypatch.setattr(trace_cache, "load_traces", load)
    made = prediction.predict(huge, setup_from_config(cfg), A100)
    changes, sentence = memory_check.find_fitting_changes(cfg, words, made)
    assert not changes and ("no module named x" in sentence if error else "your loader" in sentence)


@pytest.mark.parametrize(("memory_gb", "fits"), [(None, None), (10, False), (500, True)])
def test_what_is_offloaded_must_fit_into_the_node(memory_gb, fits):
    """Check ZeRO's offload of a network of a billion parameters: 16 bytes each, of four ranks on one node."""
    layout = ParallelLayout(nodes=1, devices=4, micro_batch=1, sharding="zero3", precision="bf16-mixed", offload=True)
    made = of(layout, replace(A100, node_memory_gb=memory_gb))
    assert made.margin > 0 and made.fits is fits
    assert prediction.fits_in_memory(made.trace, layout, replace(A100, node_memory_gb=memory_gb)) is (fits is True)
