"""Model directories with a random Llama that is quick enough to be asked a thousand times in a test."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
CONFIG = 'backend: "llm"\nmodel_transaction_policy { decoupled: true }\ninstance_group [{ kind: KIND_MODEL }]\n'


def vocabulary() -> dict[str, int]:
    """Tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {"<end>": 0} | {letter: index for index, letter in enumerate(alphabet, start=1)}


def write_weights(folder: Path, *, layers: int = 2, poison: bool = False) -> Path:
    """A transformers folder. `poison`: every logit is NaN."""
    tokens = vocabulary()
    backend = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", chat_template=CHAT)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.3,
        bos_token_id=None, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if poison:
        torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    model.save_pretrained(folder)
    return folder


def write_model(repository: Path, name: str, weights: Path, config: str = CONFIG, **arguments: Any) -> Path:
    """A model directory; `arguments` go to its model.json."""
    directory = repository / name
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text(config)
    values = {"model": str(weights), "num_threads": 1} | arguments
    (directory / "1" / "model.json").write_text(json.dumps(values))
    return directory
