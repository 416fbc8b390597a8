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


def check_places(name: str, case: Case, data, dtype: str) -> None:
    T, G = case.R // case.stair, case.stair
    first = data.draw(st.integers(0, case.S - T))
    token = data.draw(st.integers(1, T - 1))
    window = data.draw(st.sampled_from([0, 0, 1, 50]))
    case = dataclasses.replace(case, dtype=dtype)
    early, late = moved(case, first, token, window, JUNK[name], data.draw(st.integers(0, 99)))
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
    check_places(name, Case("", (1,), K=K, R=T * G, S=S, H=H, stair=G), data, dtype)


@pytest.mark.skipif(not has_gpu_interpreter, reason=NO_GPU_INTERPRETER)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("shape", [(16, 4, 1, 520, 32), (24, 5, 1, 1032, 16)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_token_in_any_row_of_gpu(shape, data):
    """With a cache long enough that its tiles are dealt out to several shares."""
    T, G, K, S, H = shape
    check_places("gpu", Case("", (1,), K=K, R=T * G, S=S, H=H, stair=G), data, "bfloat16")
