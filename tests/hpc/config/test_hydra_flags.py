"""Check Hydra's own flags and its compose API: each works as in Hydra, or a sentence says what to type."""

import argparse
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork import ENVIRON, PROJECT

from hpc.config import command_parser
from hpc.config.errors import ConfigError
from hpc.run import command_line


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undo what Hydra's `--info` does to the root logger: a handler for the output of that test, and every message."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        command_line.compose("Train.", words)
    assert not ended.value.code
    return capsys.readouterr().out


def test_every_flag_of_hydra_is_known() -> None:
    from hydra._internal.utils import get_args_parser

    parser = command_parser.make_parser(None)
    parser.add_argument("--multirun", "-m")  # train.py and submit.py answer it in two ways
    known = {flag for action in parser._actions for flag in action.option_strings}
    hydras = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    assert len(hydras) > 15 and hydras <= known


def test_a_part_of_the_config_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "--cfg", "job", "-p", "trainer", "trainer.limit_val_batches=2")
    assert out.startswith("# @package trainer\n") and "\n_target_: lightning.pytorch.Trainer\n" in out
    assert "\nlimit_val_batches: 2\n" in out and "cluster:" not in out
    with pytest.raises(ConfigError, match="--package must name a part of the config with keys; got trainr"):
        command_line.compose("Train.", ["--cfg", "job", "-p", "trainr"])
    out = printed(capsys, "--cfg", "job", "-p", "trainer", "+trainer.note='gnp\u202eexe'")
    assert "\nnote: gnp\\u202eexe\n" in out, "what turns the direction of a terminal's text is written out"


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ("defaults", "resnet_digits"),
        ("defaults-tree", "data: digits"),
        ("searchpath", "structured://"),
        ("config", "trainer:"),
    ],
)
def test_info_is_hydras(info: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in printed(capsys, "--info", info, "trainer=cpu")


def test_the_shell_completes_groups_choices_and_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert "hydra_bash_completion" in printed(capsys, "-sc", "install=bash")
    for line, words in {
        "train.py clu": ["cluster=", "cluster."],
        "train.py cluster=leo": ["cluster=leonardo"],
        "train.py trainer.max_": ["trainer.max_epochs=", "trainer.max_steps="],
    }.items():
        monkeypatch.setenv("COMP_LINE", f"python {line}")
        assert set(words) <= set(printed(capsys, "-sc", "query=bash").split())
    with pytest.raises(ConfigError, match=r"-sc cannot be answered: .*\n  Try: -sc install=bash"):
        command_line.compose("Train.", ["-sc"])


def test_version_is_hydras(capsys: pytest.CaptureFixture[str]) -> None:
    from hydra import __version__

    assert printed(capsys, "--version") == f"Hydra {__version__}\n"


@pytest.mark.parametrize("flags", command_parser.REPLACED)
def test_a_flag_that_cannot_work_says_what_to_type(flags: tuple[str, ...]) -> None:
    for flag in flags:
        with pytest.raises(ConfigError) as caught:
            command_line.compose("Train.", [flag, "x", "seed=1"])
        assert caught.value.key == flag and caught.value.fix == command_parser.REPLACED[flags][1]
    assert command_parser.make_parser(None).parse_intermixed_args(["-r"]) == argparse.Namespace(
        overrides=[], cfg=None, resolve=False, package=None, info=None, shell_completion=False, run=True
    )


NOTEBOOK = """
from hydra import compose, initialize
from omegaconf import OmegaConf

with initialize(version_base="1.3", config_path=CONFIGS):
    cfg = compose("train", ["cluster=leonardo", "trainer=ddp", "data.global_batch_size=64"])
OmegaConf.resolve(cfg.data)
OmegaConf.resolve(cfg.strategy)
print(cfg.cluster.gpus_per_node, cfg.strategy.lightning._target_, "hydra" in cfg)
"""


@pytest.mark.slow
def test_hydras_compose_api_works_as_documented(tmp_path: Path) -> None:
    configs = os.path.relpath(PROJECT / "configs", tmp_path)
    (tmp_path / "notebook.py").write_text(f"CONFIGS = {configs!r}\n{NOTEBOOK}")
    environ = ENVIRON | {"PYTHONPATH": str(PROJECT / "src")}  # as the editable install of env.sh does it
    done = subprocess.run([sys.executable, "notebook.py"], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.stdout == "4 hpc.strategies.ddp.DDP False\n", done.stderr
