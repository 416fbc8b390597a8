"""Training: corpus, pipeline, step, runs."""
