"""The two text encoders, which first learn to read: to say from a caption what stands where."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from training import stage
from training.shapes import ANCHORS, COLOURS, SHAPES, SIZES, Scene, caption
from training.tokenizer import LENGTH

HIDDEN = 64
BATCH = 64
# What a caption can say: the background's colour or none, the size, and for each of the nine places a colour and a
# shape or nothing.
_CLASSES = (len(COLOURS) + 1, len(SIZES), *[len(COLOURS) + 1] * len(ANCHORS), *[len(SHAPES) + 1] * len(ANCHORS))


class TextEncoders(nn.Module):
    """As for real SDXL they are trained before the UNet and then stay as they are: it is spared learning language by
    way of its noise."""

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        super().__init__()
        config = CLIPTextConfig(
            vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, projection_dim=HIDDEN,
            num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=LENGTH, hidden_act="gelu",
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        self.first = CLIPTextModel(config)
        self.second = CLIPTextModelWithProjection(config)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """From tokens [B, 24] what SDXL's UNet reads: both encoders' last layer but one [B, 24, 128], and one pooled
        text [B, 64]."""
        first = self.first(tokens, output_hidden_states=True)
        second = self.second(tokens, output_hidden_states=True)
        return torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1), second.text_embeds

    @torch.inference_mode()
    def encode(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        parts = [self(part) for part in tqdm(tokens.split(256), "reading", mininterval=5)]
        return torch.cat([context for context, _ in parts]), torch.cat([pooled for _, pooled in parts])


class Reader(nn.Module):
    """The encoders under small heads, which are thrown away after training."""

    def __init__(self, encoders: TextEncoders) -> None:
        super().__init__()
        self.encoders = encoders
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, sum(_CLASSES)))
            for _ in range(3)
        )

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """Logits [B, sum of classes] three times: from each encoder's states and from the pooled text."""
        context, pooled = self.encoders(tokens)
        # Attention is causal: only the caption's end and the padding after it have seen all of it.
        whole = (tokens == tokens[:, -1:])[..., None]
        mean = (context * whole).sum(1) / whole.sum(1)
        return [head(part) for head, part in zip(self.heads, (*mean.split(HIDDEN, -1), pooled), strict=True)]


def tokenize(tokenizer: CLIPTokenizer, scenes: list[Scene]) -> Tensor:
    """[N, 24]"""
    captions = [caption(scene) for scene in scenes]
    encoded = tokenizer(captions, padding="max_length", max_length=LENGTH, truncation=True, return_tensors="pt")
    return encoded.input_ids


def train_text(
    encoders: TextEncoders, tokenizer: CLIPTokenizer, scenes: list[Scene], folder: Path, steps: int, seed: int
) -> None:
    tokens, facts = tokenize(tokenizer, scenes), torch.tensor([said(scene) for scene in scenes])
    reader = Reader(encoders)

    def loss(step: int) -> Tensor:
        rows = torch.randint(len(tokens), (BATCH,), generator=torch.Generator().manual_seed(seed + 2_000_000 + step))
        total = torch.zeros(())
        for logits in reader(tokens[rows]):
            parts = logits.split(_CLASSES, -1)
            total = total + sum(F.cross_entropy(part, facts[rows, i]) for i, part in enumerate(parts))
        return total

    stage.train("text", reader, loss, folder, steps=steps, peak=2e-3, decay=0.99)
    encoders.requires_grad_(False)


@torch.inference_mode()
def reading(reader: Reader, tokenizer: CLIPTokenizer, scenes: list[Scene]) -> float:
    """Share of captions of which all three heads say everything right."""
    facts = torch.tensor([said(scene) for scene in scenes])
    right = torch.ones(len(scenes), dtype=torch.bool)
    for logits in reader(tokenize(tokenizer, scenes)):
        best = torch.stack([part.argmax(-1) for part in logits.split(_CLASSES, -1)], -1)
        right &= (best == facts).all(-1)
    return right.float().mean().item()


def said(scene: Scene) -> list[int]:
    """The class of each of `_CLASSES`. Where a caption names no place its objects have one all the same."""
    colours, shapes = [0] * len(ANCHORS), [0] * len(ANCHORS)
    for thing in scene.things:
        places = [(thing.x - x) ** 2 + (thing.y - y) ** 2 for x, y in ANCHORS.values()]
        place = places.index(min(places))
        colours[place] = 1 + list(COLOURS).index(thing.colour)
        shapes[place] = 1 + SHAPES.index(thing.shape)
    background = 1 + list(COLOURS).index(scene.background) if scene.says_background else 0
    return [background, list(SIZES).index(scene.size), *colours, *shapes]
