"""Cached rows of chosen source layers to one target layer's keys or values, in one pass.

Un-rotate (for keys), take the mean off, project, add the bias, rotate (for keys). `ref` (plain XLA, everywhere) defines
it; `tpu` is a Mosaic kernel.
"""
