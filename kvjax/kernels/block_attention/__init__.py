"""Attention of a block of rows over a length-bounded cache, with its log-sum-exp.

`ref` (plain XLA, everywhere) defines it; `tpu` (Mosaic TPU) and `gpu` (Mosaic GPU) are kernels. Each has
`is_supported` and `block_attention`; `kvjax.attention.Choice` picks among them.

One call serves prefill chunks, plain decoding, drafting and verification. R = T*G rows are folded, row
r = t*G + g, so grouped heads share reads. A row's bits do not depend on which row of the block it is: its sums
run over the same tiles in the same order, and a tile it does not see leaves them as they are.
"""
