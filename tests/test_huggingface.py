"""Check that models of Hugging Face are fine-tuned in part and by LoRA, resume exactly, and are exported for it.

The models are small, with random weights, and made here; nothing is downloaded.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiers import soak_all_but
from trial.ports.brought import LAYOUTS, QUIET, Brought
from trial.project import TESTS, warm

pytestmark = pytest.mark.slow

# Exports a run and prints how far the logits of the folder are from those of the run's module; and which parameters of
# the module still are as they were in the pretrained one.
EXPORTED = """
import json
import runpy
import sys

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, "src")
from hpc.checkpoint.trained import load

run, out, pretrained = sys.argv[1:]
sys.argv = ["tools/export.py", run, out, "--hf"]
runpy.run_path("tools/export.py", run_name="__main__")
module, _ = load(run)
tokens = torch.arange(24).reshape(2, 12)
logits = AutoModelForCausalLM.from_pretrained(out)(tokens).logits
before = AutoModelForCausalLM.from_pretrained(pretrained).state_dict() if pretrained else {}
after = {name.replace(".base_layer", "").replace("base_model.model.", ""): value
         for name, value in module.state_dict().items()}
same = [name for name, value in before.items() if torch.equal(after[f"model.{name}"], value)]
print(json.dumps({"off": (logits - module.model(tokens).logits).abs().max().item(), "same": same, "all": [*before]}))
"""
MODELS = {"frozen": "gpt2", "lora": "llama"}
FROZEN = ["transformer.wte.", "transformer.wpe.", "transformer.h.0."]
WORDS = {
    "frozen": ["data.files={}/text.txt", "model.folder={}/gpt2", f"model.frozen=[{','.join(FROZEN)}]"],
    "lora": ["data.files={}/text.jsonl", "model.folder={}/llama", "model=huggingface_lora", "model.lora.r=4"],
}


class Finetuning(Brought):
    """A baked project, local models and text, and what is typed to fine-tune them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        warm(("datasets", "peft"))
        self.environ |= {"HF_HOME": str(self.runs / "cache")}
        self.small = self.runs / "small"
        command = [sys.executable, str(TESTS / "small_models.py"), str(self.small)]
        subprocess.run(command, check=True, capture_output=True, env=self.everything)

    def words(self, name: str) -> list[str]:
        """Return the words of `frozen` or `lora`, perhaps with `+ema`, or of a port."""
        case, _, averaged = name.partition("+")
        if case not in WORDS:
            return super().words(case)
        words = [word.format(self.small) for word in WORDS[case]] + (["callbacks=ema"] if averaged else [])
        words += ["data.block_size=16", "data.batch_size=8", "model.learning_rate=0.01", "model.warmup_steps=3"]
        words += ["checkpoint.monitor=null", "callbacks.throughput=null"]
        return ["experiment=finetune_hf", *words, *QUIET]

    def python(self, code: str, *arguments: str) -> str:
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=self.everything, cwd=self.project)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def export(self, name: str, layout: str) -> tuple[Path, dict[str, Any]]:
        """Export a run after `train`. Return the folder, and what EXPORTED has printed."""
        out = self.runs / f"{name} {layout}"
        pretrained = str(self.small / MODELS[name]) if name in MODELS else ""
        lines = self.python(EXPORTED, str(self.run_dir(name, layout)), str(out), pretrained).splitlines()
        return out, json.loads(lines[-1])


@pytest.fixture(scope="module")
def finetuning(bake: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Finetuning:
    return Finetuning(bake(tmp_path_factory.mktemp("project")), tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("case", soak_all_but(itertools.product(WORDS, LAYOUTS), ("lora", "fsdp on two")))
def test_what_is_not_frozen_is_trained_resumes_with_the_same_bits_and_is_exported(
    case: tuple[str, str], finetuning: Finetuning
) -> None:
    name, layout = case
    assert finetuning.train(name, layout) == ""
    assert finetuning.resume(name, layout, stop_at=5) == ""
    out, exported = finetuning.export(name, layout)
    assert exported["off"] < 1e-5
    expected = exported["all"]
    if name == "frozen":
        expected = [key for key in expected if key.startswith(tuple(FROZEN)) or key == "lm_head.weight"]  # tied
    assert exported["same"] == expected
    files = {file.name for file in out.iterdir()}
    assert ("tokenizer.json" in files) == (name == "lora") and "adapter_config.json" not in files


@pytest.mark.soak
@pytest.mark.parametrize(("name", "layout"), [("gpt2", "fsdp on two"), ("frozen+ema", "ddp on two")])
def test_any_module_and_averaged_weights_are_exported(name: str, layout: str, finetuning: Finetuning) -> None:
    assert finetuning.train(name, layout) == ""
    _, exported = finetuning.export(name, layout)
    assert exported["off"] < 1e-5


@pytest.mark.parametrize(("words", "message"), [
    (["model.folder=/absent"], "model.folder must be a local folder with a model of Hugging Face"),
    (["model.frozen=[embed]"], "model.frozen must be beginnings of names of parameters, which are transformer.wte."),
    (["+model.lora={target_modules: [query]}"], "model.lora must be arguments of peft.LoraConfig that fit the model"),
    (["data.files=/absent"], "data.files=/absent: There are no such files"),
    (["data.block_size=100000"], "data.block_size must leave a block"),
])  # fmt: skip
def test_mistakes_are_one_sentence(words: list[str], message: str, finetuning: Finetuning) -> None:
    started = finetuning.start("wrong", [*finetuning.words("frozen"), *words], num_ranks=1)
    said = started.said()
    assert started.codes == [2] and f"ConfigError: {message}" in said and "Traceback" not in said
