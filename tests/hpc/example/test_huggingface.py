"""Check how text becomes blocks of tokens, and what is said without the packages of Hugging Face."""

import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
from omegaconf import OmegaConf

from hpc.config.errors import ConfigError
from hpc.data import file_checks
from my_research.data import huggingface as text
from my_research.models.checks import require_pretrained
from my_research.models.huggingface import CausalLM


class WithoutEnd:
    """A tokenizer whose tokens are the words, and that has none for the end of a text."""

    eos_token: str | None = None

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [[len(word) for word in text.split(" ")] for text in texts]}


class WithEnd(WithoutEnd):
    eos_token = " <end>"


def test_each_example_ends_where_the_next_one_begins() -> None:
    rows = {"text": ["ab", "é"]}
    assert text.tokenize(rows, None) == {"input_ids": [[97, 98, 10], [195, 169, 10]]}
    assert text.tokenize(rows, WithoutEnd()) == {"input_ids": [[3], [2]]}
    assert text.tokenize(rows, WithEnd()) == {"input_ids": [[2, 5], [1, 5]]}


def test_blocks_hold_each_token_once_and_the_next_ones_begin_with_the_rest() -> None:
    rest: list[int] = []
    blocks = text.cut({"input_ids": [[1, 2, 3], [4], [5, 6, 7]]}, block_size=3, rest=rest)
    assert blocks == {"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[1, 2, 3], [4, 5, 6]]}
    assert text.cut({"input_ids": [[8]]}, block_size=3, rest=rest)["input_ids"] == []
    assert text.cut({"input_ids": [[9]]}, block_size=3, rest=rest)["input_ids"] == [[7, 8, 9]]
    assert rest == []


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., text.LocalText]:
    """Return the data after setup: of a file of this name and content, and of files for validation."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "model").mkdir()

    def set_up(name: str, content: str, *, val_files: str | None = None, block_size: int = 4) -> text.LocalText:
        (tmp_path / name).write_bytes(content.encode("latin-1"))
        data = text.LocalText(str(tmp_path / name), val_files, tokenizer=str(tmp_path / "model"), block_size=block_size)
        data.setup("fit")
        return data

    return set_up


def test_large_blocks_are_cut_from_many_short_lines(load: Callable[..., text.LocalText], tmp_path: Path) -> None:
    lines = "".join(f"{i:04}\n" for i in range(5000))
    (tmp_path / "val.txt").write_text(lines)
    for _ in range(2):  # also from the cache
        data = load("train.txt", lines, val_files=str(tmp_path / "val.txt"), block_size=6000)
        for name in ("train", "test"):
            assert bytes(data.blocks[name]["input_ids"][:].flatten().tolist()).decode() == lines[:24000]


@pytest.mark.parametrize(("name", "content", "message"), [
    ("one.txt", "a line", "data.files must hold two examples or more"),
    ("latin.txt", "caf\xe9\n\n", "data.files must be .txt in UTF-8"),
    ("cut.jsonl", '{"text": "a"', "or JSON objects with the same keys: JSON parse error"),
    ("other.jsonl", '{"content": "a"}\n' * 9, "data.files must hold objects with the key `text`"),
    ("some.jsonl", '{"text": "a"}\n' * 9 + '{"text": null}\n', "data.files must hold objects with the key `text`"),
    ("numbers.jsonl", '{"text": 1}\n' * 9, "data.files must hold objects with the key `text`"),
])  # fmt: skip
def test_text_that_cannot_be_trained_on_is_rejected(
    name: str, content: str, message: str, load: Callable[..., text.LocalText]
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(name, content)


@pytest.mark.parametrize(("names", "message"), [
    (["a.npy"], "data.files=.*a.npy: Either all files must be .txt, or all must be .json or .jsonl."),
    (["a.txt", "b.md"], "data.files=.*b.md: Either all files must be .txt"),
    (["a.csv"], "data.files=.*a.csv: Either all files must be .txt"),
    (["a.jsonl", "b.txt"], "data.files=.*b.txt: .*a.jsonl differs from this one"),
])  # fmt: skip
def test_other_files_are_rejected_on_the_login_node(names: list[str], message: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("a")
    node = OmegaConf.create({"files": [str(tmp_path / name) for name in names], "tokenizer": str(tmp_path)})
    with pytest.raises(ConfigError, match=message):
        file_checks.check_local_text(node, OmegaConf.create({"model": {}}))
    with pytest.raises(ConfigError, match=message):
        text.LocalText([*node.files], tokenizer=str(tmp_path))


def test_a_folder_without_a_tokenizer_is_noted_and_a_missing_one_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    node = OmegaConf.create({"files": str(tmp_path / "a.jsonl"), "tokenizer": str(tmp_path)})
    file_checks.check_local_text(node, OmegaConf.create({"model": {}}))
    assert capsys.readouterr().err == f"note: {tmp_path} has no tokenizer: bytes are the tokens\n"
    (tmp_path / "vocab.txt").touch()
    file_checks.check_local_text(node, OmegaConf.create({"model": {}}))
    assert capsys.readouterr().err == ""
    (tmp_path / "vocab.txt").unlink()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    file_checks.check_local_text(node, OmegaConf.create({"model": {}}))
    assert capsys.readouterr().err == ""
    node.tokenizer = "/absent"
    with pytest.raises(ConfigError, match=r"data\.tokenizer must be a local folder"):
        file_checks.check_local_text(node, OmegaConf.create({"model": {}}))
    with pytest.raises(ConfigError, match=r"data\.tokenizer must be a local folder"):
        text.LocalText(node.files, tokenizer="/absent")
    file_checks.check_local_text(node, OmegaConf.create({"model": {"folder": "/absent"}}))  # for the model's check


@pytest.mark.parametrize("module", ["datasets", "peft", "transformers"])
def test_a_missing_package_is_told_with_the_line_that_installs_it(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert require_pretrained(str(tmp_path)) == tmp_path
    monkeypatch.setitem(sys.modules, module, None)
    for call in (lambda: CausalLM(str(tmp_path)), lambda: text.LocalText(str(tmp_path), tokenizer=str(tmp_path))):
        with pytest.raises(ConfigError, match=f": This needs packages that are not installed: {module}\\.") as raised:
            call()
        assert "python -m pip install -c constraints.txt datasets peft transformers" in str(raised.value)
