"""Check that the comments beside the keys are their help, and that the reference page has them."""

from pathlib import Path

import pytest
from fork import REPO

from hpc.config import command_parser, compose, conversion, defaults, documentation
from hpc.config.errors import ConfigError


def test_help_of_a_key_is_its_comment(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_parser.make_parser(None).parse_intermixed_args(
            ["--help", "cluster.chain", "seed=2", "faults.nonfinite"]
        )
    assert not ended.value.code
    out = capsys.readouterr().out
    assert out.startswith("cluster.chain=1  (int)\n    pbs: number of jobs to queue one after the other;")
    assert '\n\nseed=1  (int)\n\nfaults.nonfinite="stop"  (str)\n    what to do when a loss or gradient is NaN' in out


def test_help_of_a_section_is_that_of_all_its_keys() -> None:
    text = documentation.describe("checkpoint")
    assert text.startswith("checkpoint: Times at which the state of a run is saved")
    assert all(f"\ncheckpoint.{key}=" in text for key in ("every_minutes", "every_n_steps", "keep", "monitor", "mode"))


def test_help_of_an_argument_is_that_of_its_section_and_of_a_mistyped_key_what_is_meant() -> None:
    assert "stream_splits" in documentation.describe("data.stream_splits")
    with pytest.raises(ConfigError, match=r"--help cluster\.chian must name a key .*\n  Try: --help cluster\.chain"):
        documentation.describe("cluster.chian")


def test_every_key_has_its_help() -> None:
    node = compose.compose_overrides(["strategy=fsdp"])
    entries = [entry for name in documentation.SCHEMAS for entry in documentation.read_keys(name)]
    below = ("model.", "data.", "callbacks.", "logger.", "strategy.lightning.", "trainer.profiler.", "cluster.env.")
    assert {key for key in conversion.flatten(node) if not key.startswith(below)} <= {entry.key for entry in entries}
    silent = {
        entry.key for name in documentation.SCHEMAS for entry in documentation.read_keys(name) if not entry.comment
    }
    # What these mean, their names say.
    assert {key.rpartition(".")[2] for key in silent} <= {
        "seed", "_target_", "num_nodes", "max_epochs", "accumulate_grad_batches",
    }  # fmt: skip


def test_the_reference_page_has_them() -> None:
    text = (REPO / "docs" / "reference.md").read_text()
    assert documentation.reference_page() in text, "python -m hpc.config.documentation prints the part Keys"


def test_the_copy_of_a_jobs_code_keeps_what_lies_there(tmp_path: Path) -> None:
    defaults.write(tmp_path)
    assert "keep: 2" in (tmp_path / "base.yaml").read_text()
    (tmp_path / "base.yaml").write_text("mine: 1")
    defaults.write(tmp_path)
    assert [path.read_text() for path in tmp_path.rglob("*.yaml")] == ["mine: 1"]
