"""Any diffusers SDXL folder loads by name; what can't be served is refused at load time with a reason."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline.config import PipelineConfig
from pipeline.errors import ConfigError
from pipeline.loader import load_parts
from pipeline.pipeline import Pipeline

from tests.sdxl import tiny
from tests.sdxl.conftest import draw, job


def test_another_size_and_scheduler_need_nothing_but_model_json(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "other", sample_size=12, prediction_type="v_prediction", rescale_betas_zero_snr=True)
    config = PipelineConfig.from_dict({"model": str(folder), "scheduler": "dpm++_2m", "height": 32})
    pipeline = Pipeline(config, load_parts(config))
    (picture,) = draw(pipeline, job(pipeline))
    assert picture.pixels.shape == (32, 24, 3)
    assert picture.pixels.std() > 1


@pytest.mark.parametrize("scheduler", ["euler", "euler_a", "dpm++_2m", "ddim", "turbo", "lcm"])
def test_every_scheduler_takes_a_model_trained_to_pure_noise(tmp_path: Path, scheduler: str) -> None:
    settings: dict[str, Any] = {
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "timestep_spacing": "trailing",
    }
    config = PipelineConfig(str(tiny.write(tmp_path, **settings)))
    pipeline = Pipeline(config, load_parts(config))
    (picture,) = draw(pipeline, job(pipeline, scheduler=scheduler))
    assert picture.pixels.std() > 1


def test_half_precision_leaves_a_fragile_vae_in_float32(model_folder: Path) -> None:
    assert load_parts(PipelineConfig(str(model_folder), dtype="float16")).vae.dtype == torch.float32
    assert load_parts(PipelineConfig(str(model_folder), dtype="bfloat16")).vae.dtype == torch.bfloat16
    parts = load_parts(PipelineConfig(str(model_folder), dtype="float16", vae_dtype="float16"))
    assert (parts.vae.dtype, parts.unet.dtype) == (torch.float16, torch.float16)


def test_bfloat16_draws(model_folder: Path) -> None:
    config = PipelineConfig(str(model_folder), dtype="bfloat16")
    pipeline = Pipeline(config, load_parts(config))
    assert draw(pipeline, job(pipeline))[0].pixels.std() > 1


def test_another_vae_takes_the_place_of_the_models_own(model_folder: Path, tmp_path: Path) -> None:
    other = tiny.write(tmp_path / "other", seed=1)
    own, swapped = (load_parts(PipelineConfig(str(model_folder), vae=vae)).vae for vae in (None, str(other / "vae")))
    assert not torch.equal(own.decoder.conv_in.weight, swapped.decoder.conv_in.weight)


def test_what_is_no_sdxl_is_refused_with_a_reason(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be loaded as an SDXL pipeline"):
        load_parts(PipelineConfig(str(tmp_path)))
    with pytest.raises(ConfigError, match="device is 'cuda:7'; allowed: cpu or one of"):
        load_parts(PipelineConfig(str(model_folder), device="cuda:7"))
    with pytest.raises(ConfigError, match="width is 18; allowed: null or a multiple of 4 up to 32"):
        load_parts(PipelineConfig(str(model_folder), width=18))


def test_a_refiner_is_refused_as_no_base_model(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, time_ids=5)  # SDXL's refiner takes an aesthetic score in place of two of the six
    with pytest.raises(
        ConfigError, match="is no base model: its UNet takes 24 pooled text features and 6 sizes, and the"
    ):
        load_parts(PipelineConfig(str(folder)))
