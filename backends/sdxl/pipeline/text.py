"""Prompts to what the UNet is told: one vector a token from both text encoders, and one for the whole text."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.parts import Parts


@dataclass(frozen=True)
class Text:
    """`tokens` [length, width of all encoders], `pooled` [width of the last]."""

    tokens: Tensor
    pooled: Tensor


def encode(parts: Parts, texts: Iterable[str], batch: int) -> dict[str, Text]:
    """Each different text once, `batch` at a time. With 1 a result can't depend on what else is asked."""
    different = list(dict.fromkeys(texts))
    encoded: dict[str, Text] = {}
    for start in range(0, len(different), batch):
        chunk = different[start : start + batch]
        states, pooled = [], torch.empty(0)
        for tokenizer, encoder in parts.encoders:
            ids = tokenizer(
                chunk, padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt"
            ).input_ids
            output = encoder(ids.to(parts.device), output_hidden_states=True)
            pooled = output[0]
            # SDXL was trained on the last layer but one.
            states.append(output.hidden_states[-2])
        tokens = torch.cat(states, dim=-1)
        encoded |= {text: Text(tokens[i], pooled[i]) for i, text in enumerate(chunk)}
    return encoded


def zeros_like(text: Text) -> Text:
    return Text(torch.zeros_like(text.tokens), torch.zeros_like(text.pooled))
