"""A GGUF file becomes a folder once, whole or not at all, with the very same weights."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from engine import gguf_file
from tokenizers import pre_tokenizers

from tests.llm.tiny_tokenizers import END, byte_level

HIDDEN, HEADS, KV_HEADS, LAYERS, FEED_FORWARD = 64, 4, 2, 1, 96


def tiny_llama(vocabulary: int) -> Any:
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def rotary_pairs_side_by_side(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbours, transformers rotates halves: GGUF files hold rows in llama.cpp's order."""
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def write_gguf(path: Path, pre_tokenizer: str = "smollm", quantize: bool = False) -> dict[str, torch.Tensor]:
    """A Llama with random weights. Returns them as transformers knows them, as far as the file keeps them."""
    tokenizer = byte_level()
    described = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].get)
    weights = {name: tensor.detach().clone() for name, tensor in tiny_llama(len(tokens)).state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == END else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in described["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in weights.items():
        values = tensor.numpy()
        if quantize and name.endswith("proj.weight"):
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            values = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
            weights[name] = torch.from_numpy(values.copy())
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if part in name:
                values = rotary_pairs_side_by_side(values, heads)
        stem, _, suffix = name.rpartition(".")
        known = f"{names.get_name(stem)}.{suffix}"
        if quantize and name.endswith("proj.weight"):
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(known, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(known, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file)
    return file


@pytest.fixture
def file(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy2(made, tmp_path))


def stand_in(text: str) -> Callable[[Path, torch.dtype, Path], None]:
    """A conversion that takes no time."""

    def convert(file: Path, dtype: torch.dtype, folder: Path) -> None:
        (folder / "config.json").write_text(text)

    return convert


def never(file: Path, dtype: torch.dtype, folder: Path) -> None:
    raise AssertionError("converted again")


def beside(file: Path) -> list[str]:
    return sorted(path.name for path in file.parent.iterdir())


@pytest.mark.parametrize("quantize", [False, True])
def test_the_folder_holds_the_files_weights_exactly(tmp_path: Path, quantize: bool) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf", quantize=quantize)
    folder = gguf_file.as_folder(tmp_path / "tiny.gguf", torch.float32)
    assert folder == tmp_path / "tiny.float32"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    loaded = model.state_dict()
    assert set(loaded) == set(weights)
    for name, tensor in weights.items():
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], tensor), name


def test_the_folder_holds_the_files_tokenizer(file: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_file.as_folder(file, torch.float32))
    original = byte_level()
    for text in ("The quick brown fox", "東京タワー 👍🏽", "  spaces   and\n\nnewlines\t"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert ids == original.encode(text, add_special_tokens=False)
    assert tokenizer.eos_token == END


def test_each_dtype_has_a_folder_of_its_own(file: Path) -> None:
    folder = gguf_file.as_folder(file, torch.bfloat16)
    assert folder.name == "tiny.bfloat16"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16


def test_a_file_is_converted_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "_convert", stand_in("first"))
    folder = gguf_file.as_folder(file, torch.float32)
    monkeypatch.setattr(gguf_file, "_convert", never)
    assert gguf_file.as_folder(file, torch.float32) == folder
    assert beside(file) == ["tiny.float32", "tiny.gguf"]


def test_a_changed_file_is_converted_anew(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "_convert", stand_in("first"))
    gguf_file.as_folder(file, torch.float32)
    os.utime(file, (1, 1))
    monkeypatch.setattr(gguf_file, "_convert", stand_in("second"))
    folder = gguf_file.as_folder(file, torch.float32)
    assert (folder / "config.json").read_text() == "second"
    assert beside(file) == ["tiny.float32", "tiny.gguf"]


def test_another_user_may_read_the_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "_convert", stand_in("{}"))
    folder = gguf_file.as_folder(file, torch.float32)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError, MemoryError])
def test_an_interrupted_conversion_leaves_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    def interrupted(file: Path, dtype: torch.dtype, folder: Path) -> None:
        (folder / "model.safetensors").write_text("half")
        raise interruption("in the middle")

    monkeypatch.setattr(gguf_file, "_convert", interrupted)
    with pytest.raises(interruption):
        gguf_file.as_folder(file, torch.float32)
    assert beside(file) == ["tiny.gguf"]
    monkeypatch.setattr(gguf_file, "_convert", stand_in("whole"))
    assert (gguf_file.as_folder(file, torch.float32) / "config.json").read_text() == "whole"


@pytest.mark.parametrize("stamp", [None, "{", '{"file": "other.gguf"}'])
def test_a_folder_without_the_files_stamp_is_made_anew(
    file: Path, monkeypatch: pytest.MonkeyPatch, stamp: str | None
) -> None:
    folder = file.with_name("tiny.float32")
    folder.mkdir()
    (folder / "rest").write_text("of something else")
    if stamp:
        (folder / gguf_file.STAMP).write_text(stamp)
    monkeypatch.setattr(gguf_file, "_convert", stand_in("{}"))
    assert gguf_file.as_folder(file, torch.float32) == folder
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", gguf_file.STAMP]


def test_of_two_at_once_the_second_uses_what_the_first_made(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slower(file: Path, dtype: torch.dtype, folder: Path) -> None:
        monkeypatch.setattr(gguf_file, "_convert", stand_in("first"))
        gguf_file.as_folder(file, dtype)
        (folder / "config.json").write_text("second")

    monkeypatch.setattr(gguf_file, "_convert", slower)
    folder = gguf_file.as_folder(file, torch.float32)
    assert (folder / "config.json").read_text() == "first"
    assert beside(file) == ["tiny.float32", "tiny.gguf"]


def test_where_nothing_can_be_written_the_file_still_loads(
    file: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tests may run as root, whom no permission stops.
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    mkdtemp = tempfile.mkdtemp

    def read_only(prefix: str, dir: Path | None = None) -> str:
        if dir == file.parent:
            raise PermissionError(13, "Permission denied", str(dir))
        return mkdtemp(prefix=prefix, dir=elsewhere)

    monkeypatch.setattr(tempfile, "mkdtemp", read_only)
    monkeypatch.setattr(gguf_file, "_convert", stand_in("{}"))
    folder = gguf_file.as_folder(file, torch.float32)
    assert folder.parent == elsewhere
    assert (folder / "config.json").exists()
    assert beside(file) == ["tiny.gguf"]


# SmolLM's way of cutting text: every digit is a word of its own.


def words(tokenizer: Any, text: str) -> list[str]:
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("  3.14", ["  ", "3", ".", "1", "4"]),
        ("in 2024, 17%", ["in", " ", "2", "0", "2", "4", ",", " ", "1", "7", "%"]),
        ("x1 = y", ["x", "1", " =", " y"]),
        ("it's  here\n\n", ["it", "'s", " ", " here", "\n\n"]),
    ],
)
def test_smollms_digits_stand_alone(file: Path, text: str, cut: list[str]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_file.as_folder(file, torch.float32))
    assert words(tokenizer, text) == cut


def test_other_pre_tokenizers_stay_as_transformers_makes_them(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", pre_tokenizer="gpt-2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_file.as_folder(tmp_path / "tiny.gguf", torch.float32))
    assert isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.Sequence | pre_tokenizers.ByteLevel)
    assert words(tokenizer, "in 2024") == ["in", " 2024"]


def test_the_default_model_cuts_digits_and_keeps_text(weights: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_file.as_folder(weights, torch.float32))
    assert words(tokenizer, "  3.14") == ["  ", "3", ".", "1", "4"]
    for text in ("  3.14", "In 2024, 17% of 1,000", "東京 👍🏽\n\n\tx = 10**6"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
