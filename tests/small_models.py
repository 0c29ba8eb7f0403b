"""Write small models of Hugging Face with random weights, and text for them: python small_models.py FOLDER

gpt2/        without a tokenizer, for bytes
llama/       with a tokenizer
text.txt     a sentence a line
text.jsonl   the same sentences
"""

import json
import sys
from pathlib import Path

NOUNS, VERBS = ("wind", "river", "glacier", "cloud", "sensor", "storm"), ("moves", "follows", "measures")
SENTENCES = 2 * [f"the {noun} {verb} a {other}" for noun in NOUNS for verb in VERBS for other in NOUNS]
IDS = {"bos_token_id": 0, "eos_token_id": 0}
VOCABULARY = 320


def write_text(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text("\n".join(SENTENCES))
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in SENTENCES))


def write_models(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    gpt2 = GPT2Config(vocab_size=257, n_positions=32, n_embd=48, n_layer=3, n_head=3, **IDS)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    llama = LlamaConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=32, **sizes, **IDS
    )  # fmt: skip
    torch.manual_seed(5)
    for name, config in {"gpt2": gpt2, "llama": llama}.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


if __name__ == "__main__":
    write_text(Path(sys.argv[1]))
    write_models(Path(sys.argv[1]))
    write_tokenizer(Path(sys.argv[1]) / "llama")
