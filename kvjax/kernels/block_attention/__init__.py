"""Attention of a block of rows over a length-bounded cache, with its log-sum-exp.

One call serves prefill chunks, plain decoding, drafting and verification: every row of a sequence sees
the slots s < upper[b] (and s >= lower[b, r] in a sliding-window layer); the rows' own keys are a second,
small attention, and the two merge by log-sum-exp. R = T*G rows are folded, so grouped heads share reads.

Backends: `tpu` (Mosaic TPU), `gpu` (Mosaic GPU), `xla` (plain XLA, everywhere), tried in this order.
Naming one makes it that one or an error.
"""

from __future__ import annotations

import importlib
import types

import jax
import jax.numpy as jnp

BACKENDS = {"tpu": "tpu", "gpu": "gpu", "xla": "ref"}


class UnsupportedError(NotImplementedError):
    """The named backend cannot take these arrays on this device; the message says why."""


def block_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    upper: jax.Array,
    lower: jax.Array | None = None,
    *,
    scale: float,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B,K,R,H] float32, lse [B,K,R] float32).

    q: [B,K,R,H] with row r = t*G + g, k and v: [B,K,S,H], all of one dtype. upper: [B] int32, slot s is
    visible iff s < upper[b]. lower: [B,R] int32 or None, and s >= lower[b, r]. A row that sees nothing
    gets out 0 and lse -inf. `backend` None takes the first that supports the call.
    Raises ValueError for shapes that do not fit and UnsupportedError when a named backend refuses.
    """
    _check(q, k, v, upper, lower)
    if backend is None:
        backend = next(name for name, reason in supported(q, k).items() if reason is None)
    elif (reason := is_supported(backend, q, k)) is not None:
        raise UnsupportedError(f"block_attention backend {backend!r}: {reason}")
    return _module(backend).block_attention(q, k, v, upper, lower, scale=scale)


def supported(q: jax.Array, k: jax.Array) -> dict[str, str | None]:
    """Says for every backend, in order, why it cannot take the arrays (None = it can)."""
    return {name: is_supported(name, q, k) for name in BACKENDS}


def is_supported(backend: str, q: jax.Array, k: jax.Array) -> str | None:
    """Returns None if the backend takes q [B,K,R,H] and k [B,K,S,H] where the program will run, else why not.

    That is the device of the current mesh (`jax.set_mesh`, compile-only devices included), else JAX's
    default device.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown block_attention backend {backend!r}; known: {', '.join(BACKENDS)}")
    platform, kind = _device()
    if backend != "xla" and backend != platform:  # answered here: importing Pallas takes a noticeable time
        return f"it runs on {backend} devices, and the device is a {platform}"
    return _module(backend).is_supported(q, k, platform=platform, device_kind=kind)


def _module(backend: str) -> types.ModuleType:
    return importlib.import_module(f"{__name__}.{BACKENDS[backend]}")


def _device() -> tuple[str, str]:
    """Platform ("cpu", "gpu", "tpu") and device kind the current trace is for."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return described.platform, described.device_kind
    device = jax.config.jax_default_device or jax.local_devices()[0]
    if isinstance(device, str):
        return device, ""
    return device.platform, device.device_kind


def _check(q: jax.Array, k: jax.Array, v: jax.Array, upper: jax.Array, lower: jax.Array | None) -> None:
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"block_attention takes q [B,K,R,H] and k [B,K,S,H], got {q.shape} and {k.shape}")
    B, K, R, H = q.shape
    S = k.shape[2]
    wanted = {"k": (k.shape, (B, K, S, H)), "v": (v.shape, (B, K, S, H)), "upper": (upper.shape, (B,))}
    if lower is not None:
        wanted["lower"] = (lower.shape, (B, R))
    for name, (got, want) in wanted.items():
        if got != want:
            raise ValueError(f"block_attention: {name} has shape {got}, must be {want} for q {q.shape}")
    if R == 0 or S == 0:
        raise ValueError(f"block_attention needs at least one row and one slot, got R={R}, S={S}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"block_attention needs one dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"block_attention needs floating-point arrays, got {q.dtype}")
    for name, bound in (("upper", upper), ("lower", lower)):
        if bound is not None and not jnp.issubdtype(bound.dtype, jnp.integer):
            raise ValueError(f"block_attention: {name} must be integer, got {bound.dtype}")
