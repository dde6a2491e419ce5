"""python -m training: every stage in order, then the pipeline's folder, its accuracy and a contact sheet."""

import argparse
import os
from pathlib import Path

import numpy as np
import torch

from training import evaluate, vae
from training.diffusion import TrainingSet, build_unet, encode_scenes, train_unet
from training.export import export
from training.shapes import sample_scene
from training.text import TextEncoders, tokenize, train_text
from training.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/train_tiny_sdxl", description="Train the tiny SDXL that draws captioned shapes."
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "models" / "tiny-sdxl", help="the diffusers folder to write"
    )
    parser.add_argument(
        "--sheet", type=Path, default=ROOT / "docs" / "images" / "tiny_sdxl.png", help="the contact sheet to write"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / ".cache" / "tiny-sdxl", help="checkpoints; a killed run goes on from here"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--vae-steps", type=int, default=900)
    parser.add_argument("--text-steps", type=int, default=1800)
    parser.add_argument("--unet-steps", type=int, default=5400)
    parser.add_argument("--decoder-steps", type=int, default=900)
    parser.add_argument("--scenes", type=int, default=20000, help="captioned pictures to learn from")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    work, seed = arguments.work, arguments.seed
    work.mkdir(parents=True, exist_ok=True)

    tokenizer = train_tokenizer(work / "tokenizer", seed)
    autoencoder = vae.build_vae()
    vae.train_vae(autoencoder, work, arguments.vae_steps, seed)
    print(f"autoencoder: {vae.psnr(autoencoder, seed):.1f} dB", flush=True)

    rng = np.random.default_rng([seed, 6])
    scenes = [sample_scene(rng) for _ in range(arguments.scenes)]
    encoders = TextEncoders(tokenizer)
    train_text(encoders, tokenizer, scenes, work, arguments.text_steps, seed)

    latents = encode_scenes(autoencoder, scenes, work)
    unet = build_unet()
    data = TrainingSet(latents, *encoders.encode(tokenize(tokenizer, scenes)))
    train_unet(unet, data, work, arguments.unet_steps, seed)

    before = vae.psnr(autoencoder, seed, noise=0.1)
    vae.tune_decoder(autoencoder, work, arguments.decoder_steps, seed)
    print(
        f"decoder on noisy latents: {before:.1f} dB, tuned {vae.psnr(autoencoder, seed, noise=0.1):.1f} dB", flush=True
    )

    export(arguments.output, autoencoder, encoders, unet, tokenizer)
    evaluate.run(arguments.output, arguments.sheet, seed)


if __name__ == "__main__":
    main()
