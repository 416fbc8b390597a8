"""What a token gets does not depend on where it stands among the rows of a call, bit for bit.

Speculative decoding is exact because of this: a token that is row j of a verified block and the same token
as row 0 of a later round must have the same output.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import cases
from tests.kernels.backends import JUNK, NO_GPU_INTERPRETER, attend, has_gpu_interpreter
from tests.kernels.cases import Case

# Shapes whose rows fill registers, sublanes and row blocks unevenly: T, G, K, S, H.
SHAPES = ((16, 4, 1, 200, 32), (8, 7, 2, 192, 64), (3, 1, 1, 136, 16), (130, 4, 1, 256, 32))


def moved(case: Case, first: int, token: int, window: int, names: tuple[float, float], seed: int):
    """Two calls that hold one token, as row `token` of a block begun at `first`, and as row 0 of a later block.

    Both caches agree on the slots that token sees, and nowhere else. Returns the inputs of the two calls.
    """
    early = cases.inputs(
        dataclasses.replace(case, upper=(first + 1,), window=window),
        k_junk=names[0],
        v_junk=names[1],
        seed=seed,
    )
    late = cases.inputs(
        dataclasses.replace(case, upper=(first + token + 1,), window=window),
        k_junk=names[0],
        v_junk=names[1],
        seed=seed + 1,
    )
    G, seen = case.stair, first + token + 1
    late.q[:, :, :G] = early.q[:, :, token * G : (token + 1) * G]
    begin = max(0, seen - window) if window else 0
    for a, b in ((early.k, late.k), (early.v, late.v)):
        b[:, :, begin:seen] = a[:, :, begin:seen]
    return early, late


def check_places(name: str, case: Case, first: int, token: int, window: int, seed: int = 0) -> None:
    early, late = moved(case, first, token, window, JUNK[name], seed)
    G = case.stair
    rows = slice(token * G, (token + 1) * G)
    for field, a, b in zip(("out", "lse"), attend(name, early), attend(name, late), strict=True):
        assert np.isfinite(a[:, :, rows]).all()
        assert np.array_equal(a[:, :, rows], b[:, :, :G]), f"{field} of token {token} after {first} slots"


@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("name", ["ref", "tpu"])
def test_token_in_any_row(name: str, shape, dtype: str, data):
    T, G, K, S, H = shape
    case = Case("", (1,), K=K, R=T * G, S=S, H=H, stair=G, dtype=dtype)
    token = data.draw(st.integers(1, T - 1))
    # Anywhere, or so that the block ends about a tile's edge: the two calls then read different tiles.
    edges = st.sampled_from(range(64, S - T, 64)).map(lambda slot: slot - data.draw(st.integers(0, T - 1)))
    first = max(0, data.draw(st.integers(0, S - T) | edges if S - T > 64 else st.integers(0, S - T)))
    window = data.draw(st.sampled_from([0, 0, 1, 50]))
    check_places(name, case, first, token, window, data.draw(st.integers(0, 99)))


@pytest.mark.skipif(not has_gpu_interpreter, reason=NO_GPU_INTERPRETER)
@pytest.mark.parametrize("window", [0, 150])
@pytest.mark.parametrize(("first", "token"), [(112, 15), (120, 3), (240, 15), (300, 1), (490, 7)])
def test_token_in_any_row_of_gpu(first: int, token: int, window: int):
    """With tiles dealt out to two shares; most of these blocks end about a tile's edge."""
    case = Case("", (1,), K=1, R=64, S=520, H=32, stair=4, dtype="bfloat16")
    check_places("gpu", case, first, token, window)
