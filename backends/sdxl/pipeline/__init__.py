"""Text to image with an SDXL-style model, a batch of unlike requests at a time. Knows nothing of Triton."""
