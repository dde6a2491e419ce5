"""python -m training: every stage in order, then the pipeline's folder, its accuracy and a contact sheet."""

import argparse
import os
from pathlib import Path

import torch

from training import evaluate, vae
from training.diffusion import Denoiser, train_denoiser, training_set
from training.export import export
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
    parser.add_argument("--vae-steps", type=int, default=800)
    parser.add_argument("--denoiser-steps", type=int, default=4000)
    parser.add_argument("--decoder-steps", type=int, default=300)
    parser.add_argument("--scenes", type=int, default=12000, help="pictures that the denoiser sees")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    work, seed = arguments.work, arguments.seed
    work.mkdir(parents=True, exist_ok=True)

    tokenizer = train_tokenizer(work / "tokenizer", seed)
    autoencoder = vae.build_vae()
    vae.train_vae(autoencoder, work, arguments.vae_steps, seed)
    print(f"autoencoder: {vae.psnr(autoencoder, seed):.1f} dB", flush=True)

    denoiser = Denoiser(tokenizer)
    latents, tokens = training_set(autoencoder, tokenizer, work, arguments.scenes, seed)
    train_denoiser(denoiser, latents, tokens, work, arguments.denoiser_steps, seed)

    before = vae.psnr(autoencoder, seed, noise=0.1)
    vae.tune_decoder(autoencoder, work, arguments.decoder_steps, seed)
    print(
        f"decoder on noisy latents: {before:.1f} dB, tuned {vae.psnr(autoencoder, seed, noise=0.1):.1f} dB", flush=True
    )

    export(arguments.output, autoencoder, denoiser, tokenizer)
    evaluate.run(arguments.output, arguments.sheet, seed)


if __name__ == "__main__":
    main()
