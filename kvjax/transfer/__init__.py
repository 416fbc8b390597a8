"""Mapping the KV cache of one model into another: fit, map, repair, judge."""
