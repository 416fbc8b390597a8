"""Decoding by rounds: propose a block, run the target over it once, keep what it confirms."""
