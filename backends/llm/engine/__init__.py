"""Continuous batching for decoder-only language models. Knows nothing of Triton."""
