"""From model.json to an engine that answers, or to words that say why not."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine import gguf_file
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.generation import Generation
from engine.loader import eos_token_ids, load_engine
from engine.sampling_params import SamplingParams

from tests.llm.test_gguf_file import write_gguf
from tests.llm.tiny_tokenizers import byte_level


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `save_pretrained` leaves it."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = byte_level()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=100,
        initializer_range=0.3,
        eos_token_id=0,
    )
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    started: list[Engine] = []
    yield started
    for engine in started:
        engine.close()
        assert engine.failure is None


def config_for(model: Path | str, **values: Any) -> EngineConfig:
    return EngineConfig(model=str(model), **{"device": "cpu", "num_kv_blocks": 40, **values})


def answer(engine: Engine, prompt: list[int], max_tokens: int = 12) -> list[int]:
    ready = threading.Semaphore(0)

    def on_ready(generation: Generation) -> None:
        ready.release()

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    (generation,) = engine.submit(prompt, params, on_ready)
    tokens: list[int] = []
    while not generation.finished:
        assert ready.acquire(timeout=30)
        if delta := generation.drain():
            assert delta.error is None
            tokens += [sampled.token for sampled in delta.tokens]
    return tokens


def generated(folder: Path, prompt: list[int], max_tokens: int = 12) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        suppress_tokens=[],
        eos_token_id=None,
    )
    return out[0, len(prompt) :].tolist()


def test_a_transformers_folder_loads_and_answers(made: Path, engines: list[Engine]) -> None:
    engine = load_engine(config_for(made))
    engines.append(engine)
    prompt = engine.tokenizer.encode("The quick brown fox")
    assert answer(engine, prompt) == generated(made, prompt)
    assert engine.scheduler.max_len == 100
    assert engine.tokenizer.eos_token_ids == {0}


def test_a_gguf_file_loads_and_answers_and_loads_again(
    tmp_path: Path, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    engines.append(load_engine(config_for(tmp_path / "tiny.gguf")))
    prompt = engines[0].tokenizer.encode("The quick brown fox")
    first = answer(engines[0], prompt)
    assert first == generated(tmp_path / "tiny.float32", prompt)

    def never(*_: Any) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(gguf_file, "_convert", never)
    engines.append(load_engine(config_for(tmp_path / "tiny.gguf")))
    assert answer(engines[1], prompt) == first


def test_settings_reach_the_engine(made: Path, engines: list[Engine]) -> None:
    values = {"max_model_len": 50, "max_num_seqs": 3, "max_num_batched_tokens": 20, "block_size": 8}
    engine = load_engine(config_for(made, **values, dtype="bfloat16", enable_prefix_caching=False))
    engines.append(engine)
    limits, pool = engine.scheduler.limits, engine.scheduler.pool
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len) == (3, 20, 50)
    assert limits.prefix_caching is False
    assert (pool.num_blocks, pool.block_size) == (40, 8)
    assert len(answer(engine, [5, 6, 7])) == 12


def test_without_a_number_there_are_blocks_for_all_seats_and_no_more(made: Path, engines: list[Engine]) -> None:
    engines.append(load_engine(config_for(made, num_kv_blocks=None, max_num_seqs=5)))
    assert engines[0].scheduler.pool.block_size == 16
    assert engines[0].scheduler.pool.num_blocks == 5 * 7  # seven blocks hold the model's 100 tokens


def test_too_small_a_share_of_memory_is_refused(made: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"memory_fraction is 1e-12: too little for the KV cache \([\d,]+ bytes for one"
    ):
        load_engine(config_for(made, num_kv_blocks=None, memory_fraction=1e-12))


def test_more_than_the_model_was_trained_for_is_refused(made: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 101; allowed: at most 100, the model's own"):
        load_engine(config_for(made, max_model_len=101))


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
def test_a_device_that_is_not_there_is_refused(made: Path) -> None:
    with pytest.raises(
        ConfigError, match="device is 'cuda:0', but torch sees no CUDA device; allowed here: cpu or auto"
    ):
        load_engine(config_for(made, device="cuda:0"))


# What can't be loaded is named


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"model '{tmp_path}/nothing' can't be loaded"):
        load_engine(config_for(tmp_path / "nothing"))


def test_a_missing_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"model '{tmp_path}/nothing.gguf' can't be loaded"):
        load_engine(config_for(tmp_path / "nothing.gguf"))


@pytest.mark.parametrize("content", [b"", b"not a model at all", b"GGUF\x03\x00\x00\x00"])
def test_a_gguf_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=f"model '{tmp_path}/bad.gguf' can't be loaded"):
        load_engine(config_for(tmp_path / "bad.gguf"))
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("how", ["missing", "broken"])
def test_a_folder_with_a_file_missing_or_broken(made: Path, tmp_path: Path, name: str, how: str) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(made, folder)
    if how == "missing":
        (folder / name).unlink()
    else:
        (folder / name).write_text("{")
    with pytest.raises(ConfigError, match=f"model '{folder}' can't be loaded"):
        load_engine(config_for(folder))


def test_a_model_whose_attention_can_not_be_replaced(made: Path, tmp_path: Path) -> None:
    config = transformers.BloomConfig(vocab_size=300, hidden_size=16, n_layer=1, n_head=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="BloomForCausalLM"):
        load_engine(config_for(tmp_path))


# What ends an answer


@pytest.mark.parametrize(
    ("generation", "model", "tokenizer", "ends"),
    [
        ([1, 2], 3, 4, {1, 2}),
        (5, 3, 4, {5}),
        (0, 3, 4, {0}),
        (None, 3, 4, {3}),
        (None, [3, 6], 4, {3, 6}),
        (None, None, 4, {4}),
        (None, None, None, set()),
    ],
)
def test_the_generation_configs_end_tokens_come_first(
    generation: Any, model: Any, tokenizer: Any, ends: set[int]
) -> None:
    class Holder:
        pass

    fake: Any = Holder()
    fake.config = transformers.LlamaConfig(eos_token_id=model)
    fake.generation_config = transformers.GenerationConfig(eos_token_id=generation)
    named: Any = Holder()
    named.eos_token_id = tokenizer
    assert eos_token_ids(fake, named) == ends
