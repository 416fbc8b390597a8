"""Kernels of our own. One folder per operation: a plain-XLA reference and one file per accelerator."""
