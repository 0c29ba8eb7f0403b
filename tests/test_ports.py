"""Check that research by strangers, brought unchanged, trains, is sharded, survives a stop, and is reported.

Each port in ports/ is written as its authors would write it; it comes with one file for the model and one for the data.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO
from slurm_nodes import Slurm
from slurm_project import Desk, made_for_tests
from tiers import soak_all_but
from trial.ports import COMMAND, title
from trial.ports.brought import CALLBACKS, DATA, LAYOUTS, PORTS, Brought

pytestmark = pytest.mark.slow

# What `make test` tries of some ports; `make ports` tries every layout of all.
QUICK = {
    "gan": "ddp on two",
    "graphs": "ddp on two",
    "mnist": "one process",
    "segmentation": "fsdp on two",
    "series": "ddp on two",
    "unet": "one process",
}
# Ports that `make soak` tries with fsdp: momentum, averages, two optimizers, many parameters, batches of any size.
SHARDED = ("contrastive", "diffusion", "gan", "gpt2", "graphs")
LOOK_AT_VALUES = ("contrastive", "series")  # by int(tensor), and by lengths that PyTorch needs on the host
NEED_WHOLE_WEIGHTS = ("ema", "swa")  # of the callbacks: Lightning averages whole parameters
CASES = [
    pytest.param(name, layout, marks=[] if QUICK.get(name) == layout else pytest.mark.soak)
    for name in DATA
    for layout in LAYOUTS
    if layout == QUICK.get(name) or (layout == "fsdp on two" and name in SHARDED)
]


@pytest.fixture(scope="module")
def ports(bake: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Brought:
    return Brought(bake(tmp_path_factory.mktemp("project")), tmp_path_factory.mktemp("ports"))


@pytest.fixture(scope="module")
def desk(slurm: Slurm, ports: Brought) -> Desk:
    return Desk(slurm, made_for_tests(ports.project))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_research_of_others_trains_and_ends_with_the_same_bits_after_a_stop(
    name: str, layout: str, ports: Brought
) -> None:
    assert ports.train(name, layout) == ""
    assert ports.resume(name, layout, stop_at=8) == ""
    assert ports.report(name, layout) == ""


@pytest.mark.parametrize("name", soak_all_but(DATA, "gan", "series"))
def test_the_step_of_others_is_traced_or_measured_on_real_samples(name: str, ports: Brought) -> None:
    assert ports.plan(name) == ("on real samples" if name in LOOK_AT_VALUES else "traced")


@pytest.mark.soak
@pytest.mark.parametrize("name", ["gan", "gpt2", "graphs"])  # by hand, by tokens, of uneven samples; `make ports` all
def test_research_of_others_goes_on_after_it_was_killed_on_slurm(name: str, ports: Brought, desk: Desk) -> None:
    assert ports.submit(name, desk) == ""


@pytest.mark.soak
def test_a_run_on_four_nodes_goes_on_after_one_rank_was_killed(ports: Brought, desk: Desk) -> None:
    layout = ("trainer=ddp_4node", "trainer.devices=1")
    assert ports.submit("mnist", desk, layout=layout, killed=[2]) == ""


def test_the_page_shows_all_ports() -> None:
    page = (REPO / "docs" / "bring-your-own.md").read_text()
    assert COMMAND in page
    assert re.findall(r"^\| (.*?) \| same bits ", page, re.MULTILINE) == [title(name) for name in DATA]


@pytest.mark.soak
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_of_lightning_end_with_the_same_bits_after_a_stop(name: str, ports: Brought) -> None:
    assert ports.train(name, "ddp on two") == ""
    assert ports.resume(name, "ddp on two", stop_at=8) == ""


@pytest.mark.soak
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_of_lightning_work_with_sharded_weights_or_are_rejected(name: str, ports: Brought) -> None:
    error = ports.train(name, "fsdp on two")
    if name in NEED_WHOLE_WEIGHTS:
        assert "must be used with strategy=single or ddp, not fsdp" in error
        return
    assert error == ""
    assert ports.resume(name, "fsdp on two", stop_at=8) == ""


@pytest.mark.parametrize("name", DATA)
def test_a_port_has_two_files_and_no_line_for_this_project(name: str) -> None:
    files = sorted(file.name for file in (PORTS / name).iterdir() if file.suffix in (".yaml", ".py"))
    assert [name for name in files if name.endswith(".yaml")] == ["data.yaml", "model.yaml"]
    assert not any("hpc" in (PORTS / name / file).read_text() for file in files)
