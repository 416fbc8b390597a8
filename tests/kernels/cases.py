"""Cases for `block_attention`, shared by every backend: inputs, float64 answers, tolerances.

Errors are judged by quantile: 98 % of the elements within `most`, every element within `all`, so that a
kernel cannot hide a wrong corner behind a loose maximum.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `upper` has B entries, the bounds of row 0.

    stair G: row r sees the slots below upper + r // G, as token r // G of a chain does. stair 0: all rows see
    the slots below upper. `window` w takes away what is before upper + t - w, for token t = r // G (or r).
    """

    name: str
    upper: tuple[int, ...]
    K: int = 2
    R: int = 8
    S: int = 256
    H: int = 64
    dtype: str = "float32"
    window: int = 0
    stair: int = 0

    @property
    def B(self) -> int:
        return len(self.upper)


CASES = (
    Case("one_row", (256,), R=1),
    Case("one_slot_visible", (1,), R=4),
    Case("nothing_visible", (0, 0), R=4),
    Case("some_rows_empty", (0, 256, 77), R=3),
    Case("tile_edges", (127, 128, 129), R=7),
    Case("full", (256, 256), R=16),
    Case("slots_off_tile", (130, 200), K=3, R=12, S=200),
    Case("slots_under_tile", (33,), R=5, S=48, H=32),
    Case("rows_off_sublane", (190,), R=37),
    Case("rows_128", (500,), R=128, S=512),
    Case("heads_8", (300, 129), K=8, R=4, S=384, H=128),
    Case("head_dim_80", (200,), K=1, R=9, H=80),
    Case("head_dim_96", (200,), K=1, R=16, H=96),
    Case("head_dim_256", (200,), K=1, R=8, H=256),
    Case("long", (1900,), K=1, R=4, S=2048, H=32),
    Case("long_off_tile", (1999,), K=1, R=4, S=2000, H=32),
    Case("window", (200, 131), R=8, window=40),
    Case("window_over_all", (100,), R=8, window=300),
    Case("window_starts_late", (700,), K=1, R=6, S=768, window=20),
    Case("window_empty_rows", (256, 90), R=24, window=8),
    Case("window_off_tile", (200, 3), R=33, S=200, window=70),
    Case("bf16_small", (256, 19), R=8, dtype="bfloat16"),
    Case("bf16_empty_rows", (0, 70), R=4, dtype="bfloat16"),
    Case("bf16_qwen3", (600,), K=2, R=64, S=640, H=128, dtype="bfloat16"),
    Case("bf16_two_row_blocks", (300,), K=1, R=70, S=320, dtype="bfloat16"),
    Case("bf16_head_dim_80", (150,), K=1, R=16, S=192, H=80, dtype="bfloat16"),
    Case("bf16_head_dim_96", (150,), K=1, R=5, S=192, H=96, dtype="bfloat16"),
    Case("bf16_head_dim_32_off_tile", (199,), K=1, R=5, S=200, H=32, dtype="bfloat16"),
    Case("bf16_under_tile", (20,), K=1, R=5, S=40, dtype="bfloat16"),
    Case("bf16_long", (2000,), K=1, R=4, S=2048, dtype="bfloat16"),
    Case("bf16_window", (300, 150), K=1, R=12, S=320, dtype="bfloat16", window=50),
    Case("bf16_window_off_tile", (200,), K=1, R=33, S=200, dtype="bfloat16", window=70),
    Case("bf16_window_empty_rows", (128,), K=1, R=24, S=128, dtype="bfloat16", window=8),
)


def chain(name: str, first: tuple[int, ...], T: int, G: int, **fields) -> Case:
    """T tokens of G heads, written at `first`, each seeing the cache up to its own slot."""
    return Case(name, tuple(f + 1 for f in first), R=T * G, stair=G, **fields)


CHAINS = (
    chain("chain_1x1", (77,), 1, 1),
    chain("chain_1x8", (0, 128), 1, 8),
    chain("chain_2x3", (126, 63), 2, 3, K=3),
    chain("chain_4x7_into_next_tile", (62, 190), 4, 7),
    chain("chain_5x1_from_0", (0, 0), 5, 1),
    chain("chain_8x4_to_the_end", (248, 100), 8, 4),
    chain("chain_16x8", (120, 5), 16, 8, S=192),
    chain("chain_16x5_past_the_end", (245,), 16, 5),
    chain("chain_nothing_for_the_first", (-1, -3), 6, 2),
    chain("chain_off_tile", (180, 100), 16, 3, S=200),
    chain("chain_under_tile", (30,), 8, 2, S=48, H=32),
    chain("chain_window", (200, 20), 16, 2, window=40),
    chain("chain_window_1", (130,), 8, 3, window=1),
    chain("chain_window_off_tile", (184, 3), 16, 4, S=200, window=70),
    chain("chunk", (0, 60), 128, 4, S=192, K=1, H=32),
    chain("chunk_row_blocks", (40,), 128, 8, S=192, K=1, H=32),
    chain("chunk_window", (50,), 128, 5, S=192, K=1, H=32, window=33),
    chain("bf16_chain_1x4", (600,), 1, 4, S=640, H=128, dtype="bfloat16"),
    chain("bf16_chain_4x7", (62, 190), 4, 7, dtype="bfloat16"),
    chain("bf16_chain_8x8_into_next_tile", (60, 319), 8, 8, S=328, dtype="bfloat16"),
    chain("bf16_chain_16x4", (300, 0), 16, 4, K=1, S=320, H=128, dtype="bfloat16"),
    chain("bf16_chain_16x8_row_blocks", (250,), 16, 8, S=320, K=1, dtype="bfloat16"),
    chain("bf16_chain_past_the_end", (245,), 16, 5, K=1, dtype="bfloat16"),
    chain("bf16_chain_under_tile", (30,), 8, 2, K=1, S=40, dtype="bfloat16"),
    chain("bf16_chain_window", (300, 20), 16, 3, K=1, S=328, dtype="bfloat16", window=50),
    chain("bf16_chunk", (60,), 128, 4, S=192, K=1, H=32, dtype="bfloat16"),
    chain("bf16_chunk_window", (9,), 128, 2, S=144, K=1, H=32, dtype="bfloat16", window=33),
)
CASES += CHAINS


@dataclasses.dataclass(frozen=True)
class Tolerance:
    most: float
    all: float


# lse comes from float32 scores whatever the inputs are; out carries the rounding of the weights to bfloat16.
TOLERANCE = {
    "float32": {"out": Tolerance(1e-6, 5e-6), "lse": Tolerance(1e-6, 5e-6)},
    "bfloat16": {"out": Tolerance(2e-3, 8e-3), "lse": Tolerance(1e-6, 5e-6)},
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """q [B,K,R,H], k and v [B,K,S,H] in the case's dtype, upper [B], lower [B,R] or None (int32), scale, stair."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    upper: np.ndarray
    lower: np.ndarray | None
    scale: float
    stair: int = 0


def inputs(case: Case, *, k_junk: float, v_junk: float, seed: int = 0) -> Inputs:
    """Draws the case; slots that no row of a sequence sees hold `k_junk` and `v_junk`."""
    rng = np.random.default_rng(seed)
    dtype = ml_dtypes.bfloat16 if case.dtype == "bfloat16" else np.float32
    q = rng.standard_normal((case.B, case.K, case.R, case.H)).astype(dtype)
    k, v = rng.standard_normal((2, case.B, case.K, case.S, case.H)).astype(dtype)
    upper = np.array(case.upper, np.int32)
    lower = None
    if case.window:
        token = np.arange(case.R) // max(case.stair, 1)
        lower = (upper[:, None] - case.window + token).astype(np.int32)
    seen = visible(upper, lower, case.R, case.S, case.stair).any(axis=1)  # [B, S]
    k = np.where(seen[:, None, :, None], k, np.array(k_junk, dtype))
    v = np.where(seen[:, None, :, None], v, np.array(v_junk, dtype))
    return Inputs(q, k, v, upper, lower, case.H**-0.5, case.stair)


def visible(upper: np.ndarray, lower: np.ndarray | None, R: int, S: int, stair: int = 0) -> np.ndarray:
    """Returns the mask [B,R,S] that upper [B], stair and lower [B,R] mean."""
    slot, row = np.arange(S), np.arange(R)
    bound = upper[:, None] + (row // stair if stair else 0 * row)
    mask = slot < bound[:, :, None]
    return mask if lower is None else mask & (slot >= lower[:, :, None])


def answer(x: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """out [B,K,R,H] and lse [B,K,R] in float64, row by row over the visible slots only."""
    B, K, R, H = x.q.shape
    mask = visible(x.upper, x.lower, R, x.k.shape[2], x.stair)
    out, lse = np.zeros((B, K, R, H)), np.full((B, K, R), -np.inf)
    for b in range(B):
        for r in range(R):
            slots = np.flatnonzero(mask[b, r])
            if not len(slots):
                continue
            k, v = (a[b][:, slots].astype(np.float64) for a in (x.k, x.v))
            scores = np.einsum("kh,ksh->ks", x.q[b, :, r].astype(np.float64), k) * x.scale
            top = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(axis=1)
            out[b, :, r] = np.einsum("ks,ksh->kh", weights, v) / total[:, None]
            lse[b, :, r] = top[:, 0] + np.log(total)
    return out, lse


def errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Absolute errors, scaled down where the wanted value exceeds 1; equal infinities are no error."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    same = np.isneginf(got) & np.isneginf(want)
    with np.errstate(invalid="ignore"):
        difference = np.abs(got - want) / np.maximum(1.0, np.where(np.isfinite(want), np.abs(want), 1.0))
    return np.where(same, 0.0, difference)


def check(got: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, np.ndarray], dtype: str) -> None:
    """Raises AssertionError with the measured errors unless (out, lse) meets the tolerances of dtype."""
    for name, g, w in zip(("out", "lse"), got, want, strict=True):
        assert g.shape == w.shape, f"{name}: shape {g.shape}, wanted {w.shape}"
        assert g.dtype == np.float32, f"{name}: {g.dtype}, wanted float32"
        error, bound = errors(g, w), TOLERANCE[dtype][name]
        assert not np.isnan(error).any(), f"{name}: {np.isnan(error).sum()} elements are NaN"
        most, largest = np.quantile(error, 0.98, method="higher"), error.max()
        assert most <= bound.most, f"{name}: 98 % within {most:.2e}, allowed {bound.most:.0e}"
        assert largest <= bound.all, f"{name}: all within {largest:.2e}, allowed {bound.all:.0e}"
