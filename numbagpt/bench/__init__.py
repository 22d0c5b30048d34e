"""Benchmarks of the kernels and of the training step: `python -m numbagpt.bench`."""
