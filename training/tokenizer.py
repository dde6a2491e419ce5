"""A CLIP tokenizer with byte-pair merges learned from the captions: every word of the shape world is one token."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import CLIPTokenizer

from training.shapes import caption, sample_scene

LENGTH = 24  # tokens a caption, begin and end included; the longest has 17


def train_tokenizer(folder: Path, seed: int) -> CLIPTokenizer:
    rng = np.random.default_rng([seed, 1])
    bpe = Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
    bpe.normalizer = normalizers.Lowercase()
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        # Any other word is spelled in letters instead of failing.
        initial_alphabet=[chr(c) for c in range(33, 127)],
        end_of_word_suffix="</w>",
        special_tokens=["<|startoftext|>", "<|endoftext|>"],
        show_progress=False,
    )
    bpe.train_from_iterator((caption(sample_scene(rng)) for _ in range(4000)), trainer)
    learned = json.loads(bpe.to_str())["model"]
    vocabulary: dict[str, int] = dict(learned["vocab"])
    for letter in map(chr, range(33, 127)):
        for token in (letter, letter + "</w>"):
            vocabulary.setdefault(token, len(vocabulary))
    folder.mkdir(parents=True, exist_ok=True)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in learned["merges"]]
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=LENGTH)
