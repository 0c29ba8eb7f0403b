"""Check which model of a module is exported for Hugging Face, and what is rejected."""

import json
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from omegaconf import OmegaConf
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from hpc.checkpoint import huggingface_folder, tokenizer_folder, trained
from hpc.config import compose
from hpc.config.errors import ConfigError
from hpc.config.freezing import to_frozen_yaml
from hpc.programs import export
from hpc.run import frozen_config


def model(kind: type = GPT2LMHeadModel) -> nn.Module:
    return kind(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0))


class Holder(L.LightningModule):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)


def rejection(module: nn.Module) -> str:
    with pytest.raises(ConfigError) as error:
        huggingface_folder.find_model(module)
    return str(error.value)


def test_the_outermost_model_is_found() -> None:
    inner = model()
    assert huggingface_folder.find_model(Holder(head=nn.Linear(2, 2), network=nn.Sequential(inner))) is inner
    adapted = get_peft_model(model(), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    assert huggingface_folder.find_model(Holder(network=adapted)) is adapted


def test_none_or_several_models_are_rejected() -> None:
    assert "and it holds none" in rejection(Holder(network=nn.Linear(2, 2)))
    assert "and it holds several: parts.student, parts.teacher" in rejection(Holder(student=model(), teacher=model()))


@pytest.mark.parametrize("config", [
    LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False),
    IA3Config(
        task_type="CAUSAL_LM", target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True,
        init_ia3_weights=False,  # random ones
    ),
])  # fmt: skip
def test_adapters_are_merged(config: LoraConfig) -> None:
    adapted = get_peft_model(model(), config).eval()
    tokens = torch.arange(8)[None]
    expected = adapted(tokens).logits
    merged = huggingface_folder.merge_adapters(adapted)
    torch.testing.assert_close(merged(tokens).logits, expected)
    assert merged.state_dict().keys() == model().state_dict().keys()


def test_adapters_that_are_no_weights_are_rejected() -> None:
    prompts = get_peft_model(model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ConfigError, match=r"must have adapters that can be merged .* got PROMPT_TUNING"):
        huggingface_folder.merge_adapters(prompts)


def test_a_tokenizer_of_any_files_is_loaded(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    assert tokenizer_folder.load_tokenizer(tmp_path) is None
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b")
    assert tokenizer_folder.load_tokenizer(tmp_path)("ab")["input_ids"] == [2]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"])
def test_a_tokenizer_that_is_not_whole_is_rejected(name: str, tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(ConfigError, match=r"must have (a tokenizer that transformers can load|the vocabulary)"):
        tokenizer_folder.load_tokenizer(tmp_path)


def test_the_tokenizer_is_loaded_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    model().save_pretrained(source)
    monkeypatch.setattr(
        trained, "load_module", lambda *_: (Holder(network=GPT2LMHeadModel.from_pretrained(source)), {})
    )
    monkeypatch.setattr(frozen_config, "read_compatible", lambda _: None)
    monkeypatch.setattr(huggingface_folder.export, "choose_checkpoint", lambda *_, **__: tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)  # it is not needed
    (source / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=f"{source} must have a tokenizer"):
        huggingface_folder.write(tmp_path / "run", out)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    (source / "tokenizer_config.json").unlink()
    huggingface_folder.write(tmp_path / "run", out)
    assert (out / "config.json").is_file() and not tokenizer_folder.has_tokenizer(out)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="--hf: This needs packages that are not installed: peft\\."):
        huggingface_folder.write(tmp_path / "run", out)


class Lazy(L.LightningModule):
    """Makes its network where Lightning wants large ones to be made."""

    def configure_model(self) -> None:
        self.network = model(GPT2Model)


def test_a_network_of_configure_model_is_loaded(tmp_path: Path) -> None:
    wanted = Lazy()
    wanted.configure_model()
    torch.save({"state_dict": wanted.state_dict()}, tmp_path / "it.ckpt")
    cfg = OmegaConf.create({"model": {"_target_": f"{__name__}.Lazy"}})
    loaded, _ = trained.load_module(cfg, tmp_path / "it.ckpt")
    assert torch.equal(huggingface_folder.find_model(loaded).wte.weight, wanted.network.wte.weight)


def test_a_folder_that_exists_and_a_checkpoint_without_its_run_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, message in (
        ([tmp_path, tmp_path], "OUT must be a new folder"),
        ([tmp_path, tmp_path / "absent" / "out"], "OUT must be in a folder that exists"),
        ([tmp_path, tmp_path / "out"], "must be a run directory, but it holds no config.yaml"),
    ):
        monkeypatch.setattr(sys, "argv", ["export.py", *map(str, words), "--hf"])
        with pytest.raises(ConfigError, match=message):
            export.main()
    assert not list(tmp_path.iterdir())


def test_a_run_directory_builds_only_trusted_classes(tmp_path: Path) -> None:
    cfg = compose.compose_overrides([f"run_dir={tmp_path / 'run'}"])
    cfg.model = {"_target_": "subprocess.run", "args": ["touch", str(tmp_path / "built")]}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_frozen_yaml(cfg))
    with pytest.raises(ConfigError, match="must be in a trusted package"):
        huggingface_folder.write(tmp_path / "run", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
