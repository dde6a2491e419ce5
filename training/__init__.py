"""Trains the tiny SDXL pipeline: real classes, few parameters, captioned shapes. scripts/train_tiny_sdxl runs it."""
