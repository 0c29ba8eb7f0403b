"""Write train.jsonl and validation.jsonl, sentences of a small grammar, and pretrained/, a small saved GPT-2."""

import json
import random
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

SUBJECTS = ["The wind", "A river", "The glacier", "Our model", "The old sensor", "A cloud"]
VERBS = ["moves", "follows", "measures", "changes", "forgets"]
OBJECTS = ["the valley", "a storm", "the coast", "its own past", "the season", "every number"]


def make_data(folder: Path) -> None:
    rng = random.Random(5)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 250), ("validation", 40)):
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for _ in range(count):
                words = [(rng.choice(SUBJECTS), rng.choice(VERBS), rng.choice(OBJECTS)) for _ in range(3)]
                text = " ".join(f"{subject} {verb} {obj}." for subject, verb, obj in words)
                file.write(json.dumps({"text": text}) + "\n")

    config = GPT2Config(
        vocab_size=257, n_positions=64, n_embd=48, n_layer=2, n_head=3, bos_token_id=256, eos_token_id=256
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        GPT2LMHeadModel(config).save_pretrained(folder / "pretrained")


if __name__ == "__main__":
    make_data(Path(sys.argv[1]))
