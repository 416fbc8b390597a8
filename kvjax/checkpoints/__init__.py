"""Published checkpoints in and out: readers, the table that maps their tensors, named models."""
