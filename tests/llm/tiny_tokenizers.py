"""Tokenizers of the two kinds that language models use, trained on a few lines."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "naïve café, Zürich, Ærøskøbing",
    "東京タワーは高い。你好,世界!",
    "👩‍👩‍👧‍👦 family 👍🏽 flags 🇩🇪 ❤️‍🔥 done",
    "नमस्ते दुनिया — مرحبا بالعالم",
    "  spaces   and\n\nnewlines\t",
]
END = "<|end|>"


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's, Llama 3's, Qwen's: every byte is a token, and frequent runs of bytes are, too."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=[END], show_progress=False, min_frequency=1
    )
    backend.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)


def sentence_piece() -> PreTrainedTokenizerFast:
    """As Llama 2's, Mistral's, Gemma's: ▁ for a space, bytes where no word fits, no space before the first word."""
    pieces = [END, *[f"<0x{byte:02X}>" for byte in range(256)]]
    words = ["The", "fox", "quick", "dog", "東京", "é", ".", ",", "ing", "🇩"]
    pieces += ["▁", *words, *[f"▁{word}" for word in words], *"abcdefghijklmnopqrstuvwxyz"]
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
