"""Check how text becomes blocks of tokens, and what is said without the packages of Hugging Face."""

import sys
from pathlib import Path

import pytest

from hpc.config.errors import ConfigError
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


def test_blocks_hold_each_token_once_and_drop_the_rest() -> None:
    blocks = text.cut({"input_ids": [[1, 2, 3], [4], [5, 6, 7]]}, block_size=3)
    assert blocks == {"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[1, 2, 3], [4, 5, 6]]}
    assert text.cut({"input_ids": [[1, 2]]}, block_size=3)["input_ids"] == []


@pytest.mark.parametrize("module", ["datasets", "peft", "transformers"])
def test_a_missing_package_is_told_with_the_line_that_installs_it(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert require_pretrained(str(tmp_path)) == tmp_path
    monkeypatch.setitem(sys.modules, module, None)
    for call in (lambda: CausalLM(str(tmp_path)), lambda: text.LocalText(str(tmp_path), tokenizer=str(tmp_path))):
        with pytest.raises(ConfigError, match=f"{module} cannot be imported") as raised:
            call()
        assert "python -m pip install -c constraints.txt datasets peft transformers" in str(raised.value)
