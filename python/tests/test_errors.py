"""Bad input: an exception that names the argument, and outputs that nobody has touched."""

from __future__ import annotations

import copy
import pickle
from decimal import Decimal

import manyhead
import numpy as np
import pytest
from manyhead import _abi, _library

Q = np.ones((2, 4, 3, 8), np.float32)
K = np.ones((2, 2, 5, 8), np.float32)
V = np.ones((2, 2, 5, 6), np.float32)


def bad(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


HUGE = 2**64

# (what is different from a good call, exception, text)
CASES = [
    # shapes
    ({"q": bad(4, 3, 8)}, ValueError, r"q has shape \(4, 3, 8\), must have 4 dimensions \(batch, heads, len, dim\)"),
    ({"v": bad(1, 2, 2, 5, 6)}, ValueError, "v has shape .* must have 4 dimensions"),
    ({"q": bad(2, 4, 3)[0], "layout": "bshd"}, ValueError, r"\(batch, len, heads, dim\)"),
    ({"k": bad(3, 2, 5, 8)}, ValueError, r"k\.shape\[0\] is 3, must equal q\.shape\[0\] = 2"),
    ({"k": bad(2, 2, 5, 7)}, ValueError, r"k\.shape\[3\] is 7, must equal q\.shape\[3\] = 8"),
    ({"v": bad(2, 2, 4, 6)}, ValueError, r"v\.shape\[2\] is 4, must equal k\.shape\[2\] = 5"),
    ({"v": bad(2, 1, 5, 6)}, ValueError, r"v\.shape\[1\] is 1, must equal k\.shape\[1\] = 2"),
    ({"v": bad(1, 2, 5, 6)}, ValueError, r"v\.shape\[0\] is 1, must equal k\.shape\[0\] = 2"),
    ({"k": bad(2, 3, 5, 8), "v": bad(2, 3, 5, 6)}, ValueError, "heads.*4.*kv_heads|kv_heads.*3.*heads"),
    ({"q": bad(2, 4, 3, 0), "k": bad(2, 2, 5, 0)}, ValueError, "head_dim"),
    ({"layout": "sbhd"}, ValueError, "layout is 'sbhd', must be one of 'bhsd', 'bshd'"),
    ({"layout": None}, ValueError, "layout is None"),
    # types
    ({"q": [[[[1.0]]]]}, TypeError, "q must be an array .*, not list"),
    ({"k": 3.0}, TypeError, "k must be an array .*, not float"),
    ({"v": None}, TypeError, "v must be an array .*, not NoneType"),
    ({"q": Q.astype(np.int32)}, TypeError, "q has dtype int32, must be float32, float64, float16 or bfloat16"),
    ({"q": Q.astype(np.longdouble)}, TypeError, "q has dtype"),
    ({"q": Q.astype(np.complex64)}, TypeError, "q has dtype complex64"),
    ({"q": Q.astype(str)}, TypeError, "q has dtype <U"),
    ({"q": b"bytes"}, TypeError, "q has dtype uint8"),
    ({"q": np.ma.array(Q)}, TypeError, "q is a masked array; pass its data, and the mask as attn_mask or key_mask$"),
    ({"sinks": np.ma.zeros(4)}, TypeError, "sinks is a masked array; pass its data$"),
    ({"k": K.astype(np.float64)}, TypeError, "q float32, k float64, v float32: k differs from q"),
    ({"v": V.astype(np.float16)}, TypeError, "v differs from q"),
    # options
    ({"scale": np.nan}, ValueError, "scale"),
    ({"scale": np.inf}, ValueError, "scale"),
    ({"scale": "big"}, TypeError, "scale must be a real number, not str"),
    ({"scale": np.array([0.5, 0.5])}, TypeError, "scale must be a real number, not ndarray"),
    ({"scale": np.array("big")}, TypeError, "scale must be a real number, not ndarray"),
    ({"scale": np.array(1j)}, TypeError, "scale must be a real number, not ndarray"),
    ({"scale": 10**400}, ValueError, "scale is too large"),
    ({"softcap": -1.0}, ValueError, "softcap"),
    ({"softcap": np.nan}, ValueError, "softcap"),
    ({"fast_exp": 2}, TypeError, "fast_exp"),
    ({"softcap": None}, TypeError, "softcap must be a real number, not NoneType"),
    ({"causal": True}, ValueError, "(?s)(?=.*top_left|.*TOP_LEFT)(?=.*bottom_right|.*BOTTOM_RIGHT)"),
    ({"window": (1, 1)}, ValueError, "(?s)(?=.*top_left|.*TOP_LEFT)(?=.*bottom_right|.*BOTTOM_RIGHT)"),
    ({"causal": "yes"}, TypeError, "causal must be True or False, not 'yes'"),
    ({"causal": 2, "align": "top_left"}, TypeError, "causal must be True or False, not 2"),
    ({"align": "left"}, ValueError, "align is 'left', must be one of None, 'top_left', 'bottom_right'"),
    ({"align": ["top_left"]}, ValueError, "align is "),
    ({"window": (1, -2), "align": "top_left"}, ValueError, "window_right"),
    ({"window": 3, "align": "top_left"}, TypeError, r"window must be a pair \(left, right\), not 3"),
    ({"window": (1, 2, 3), "align": "top_left"}, TypeError, "window must be a pair"),
    ({"window": (1.5, 0), "align": "top_left"}, TypeError, "window_left must be an integer, not float"),
    ({"window": (HUGE, 0), "align": "top_left"}, ValueError, "window_left is 18446744073709551616, must fit a 64-bit"),
    ({"window": (1, 0), "window_left": 1}, ValueError, "give window or window_left and window_right, not both"),
    ({"window_right": "2", "align": "top_left"}, TypeError, "window_right must be an integer, not str"),
    ({"alibi_mode": "square"}, ValueError, "alibi_mode is 'square'"),
    ({"alibi_mode": "signed"}, ValueError, "alibi_mode is 'signed', but there are no alibi_slopes"),
    ({"lse_base": "2"}, ValueError, "but return_lse is False"),
    ({"lse_base": 2}, ValueError, "lse_base is 2, must be one of 'e', '2'"),
    ({"return_lse": "e"}, TypeError, "return_lse must be True or False"),
    ({"return_column_sums": None}, TypeError, "return_column_sums must be True or False"),
    ({"return_weights": "all"}, ValueError, "return_weights is 'all', must be one of False, True, 'mean'"),
    ({"return_scores": True}, ValueError, "return_scores is True, must be one of 'raw', 'capped', 'biased'"),
    ({"threads": -1}, ValueError, "threads is -1"),
    ({"threads": 1.5}, TypeError, "threads must be an integer, not float"),
    ({"threads": 2**31}, ValueError, "threads is 2147483648"),
    # masks
    ({"attn_mask": bad(3, 4, dtype=bool)}, ValueError, r"attn_mask has shape \(3, 4\), .* \(2, 4, 3, 5\)"),
    ({"attn_mask": bad(1, 2, 4, 3, 5, dtype=bool)}, ValueError, "attn_mask has shape"),
    ({"attn_mask": bad(3, 5, dtype=np.int64)}, TypeError, "attn_mask has dtype int64, must be bool or uint8"),
    ({"attn_mask": bad(3, 5, dtype=np.int8)}, TypeError, "attn_mask has dtype int8"),
    ({"attn_mask": [[0.5, 1], [2]]}, ValueError, "attn_mask: .*inhomogeneous"),
    ({"key_mask": [[True, False], [True]]}, ValueError, "key_mask: .*inhomogeneous"),
    ({"seqused_k": [[1], [1, 2]]}, ValueError, "seqused_k: .*inhomogeneous"),
    ({"sinks": [[1], [1, 2]]}, ValueError, "sinks: .*inhomogeneous"),
    ({"attn_mask": "mask"}, TypeError, "attn_mask must be an array"),
    ({"attn_mask": bad(3, 5), "attn_bias": bad(3, 5)}, ValueError, "attn_mask is additive and attn_bias is given too"),
    ({"attn_bias": bad(3, 5, dtype=bool)}, TypeError, "attn_bias has dtype bool"),
    ({"attn_bias": bad(4, 5)}, ValueError, "attn_bias .*has shape"),
    ({"key_mask": bad(2, 4, dtype=bool)}, ValueError, r"key_mask has shape \(2, 4\), .* \(2, 5\)"),
    ({"key_mask": bad(2, 5)}, TypeError, "key_mask has dtype float32, must be bool or uint8"),
    ({"key_mask": bad(1, 2, 5, dtype=bool)}, ValueError, "key_mask has shape"),
    # vectors
    ({"seqused_k": [1]}, ValueError, r"seqused_k has shape \(1,\), must be \(batch,\) = \(2,\)"),
    ({"seqused_k": [[1, 2]]}, ValueError, "seqused_k has shape"),
    ({"seqused_k": [1.0, 2.0]}, TypeError, "seqused_k has dtype float64, must be integers"),
    ({"seqused_k": [True, False]}, TypeError, "seqused_k has dtype bool"),
    ({"seqused_k": [0, 6]}, ValueError, "seqused_k"),
    ({"seqused_k": [-1, 2]}, ValueError, "seqused_k"),
    ({"seqused_k": [0, HUGE]}, ValueError, "seqused_k holds something that does not fit"),
    ({"seqused_k": np.array([0, 2**63], np.uint64)}, ValueError, "seqused_k holds something that does not fit"),
    ({"seqused_k": 5}, TypeError, "seqused_k must be an array"),
    ({"q_offset": 2**63, "causal": True}, ValueError, "q_offset is 9223372036854775808, must fit"),
    ({"q_offset": 2**62, "causal": True}, ValueError, "q_offset"),
    ({"q_offset": [2**62, 0], "causal": True}, ValueError, "q_offset"),
    ({"q_offset": [0], "causal": True}, ValueError, "q_offset has shape"),
    ({"q_offset": 1.0, "causal": True}, TypeError, "q_offset must be an integer or an array of integers, not float"),
    ({"q_offset": np.array(1.0), "causal": True}, TypeError, "q_offset has dtype float64, must be integers"),
    ({"alibi_slopes": bad(3), "align": "top_left"}, ValueError,
     r"alibi_slopes has shape \(3,\), must be \(4,\) or \(2, 4\)"),
    ({"alibi_slopes": bad(4, 2), "align": "top_left"}, ValueError, "alibi_slopes has shape"),
    ({"alibi_slopes": bad(4, dtype=complex), "align": "top_left"}, TypeError, "alibi_slopes has dtype complex128"),
    ({"alibi_slopes": bad(4)}, ValueError, "(?s)(?=.*top_left|.*TOP_LEFT)(?=.*bottom_right|.*BOTTOM_RIGHT)"),
    ({"sinks": bad(2)}, ValueError, r"sinks has shape \(2,\), must be \(heads,\) = \(4,\)"),
    ({"sinks": bad(4, dtype=bool)}, TypeError, "sinks has dtype bool"),
    # workspace
    ({"workspace": np.zeros(64, np.uint8)[:0]}, ValueError, "^workspace"),
    ({"workspace": np.zeros(200, np.uint8)[1:]}, ValueError, "^workspace is at address"),
    ({"workspace": b"\0" * 200}, ValueError, "workspace must be writable"),
    ({"workspace": np.zeros((64, 64), np.uint8)[:, ::2]}, ValueError, "workspace must be writable and contiguous"),
    ({"workspace": 4096}, TypeError, "workspace must be an array"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "exception", "text"), CASES, ids=[f"{i}-{next(iter(c[0]))}" for i, c in enumerate(CASES)]
)
def test_bad_argument(change, exception, text):
    arguments = {"q": Q, "k": K, "v": V} | change
    out = np.full((2, 4, 3, 6), 7, np.float32)
    with pytest.raises(exception, match=text):
        manyhead.attention(**arguments, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize(("out", "exception", "text"), [
    (np.zeros((2, 4, 3, 5), np.float32), ValueError, r"out has shape \(2, 4, 3, 5\), must be \(2, 4, 3, 6\)"),
    (np.zeros((4, 3, 6), np.float32), ValueError, "out has shape"),
    (np.zeros((2, 4, 3, 6)), TypeError, "out has dtype float64, must be that of q: float32"),
    (np.zeros((2, 4, 3, 6), np.int32), TypeError, "out has dtype int32"),
    (np.broadcast_to(np.zeros(6, np.float32), (2, 4, 3, 6)), ValueError, "out is read-only"),
    (np.lib.stride_tricks.as_strided(np.zeros(6, np.float32), (2, 4, 3, 6), (0, 0, 0, 4)), ValueError, "out"),
    ([], TypeError, "out must be an array"),
])  # fmt: skip
def test_bad_out(out, exception, text):
    with pytest.raises(exception, match=text):
        manyhead.attention(Q, K, V, out=out)


def test_out_may_not_overlap_an_input():
    memory = np.ones((2, 2, 3, 8), np.float32)
    with pytest.raises(ValueError, match="out"):
        manyhead.attention(memory, memory.copy(), memory.copy(), out=memory)
    assert (memory == 1).all()
    shifted = np.ones(memory.size + 4, np.float32)
    q, out = shifted[4:].reshape(memory.shape), shifted[:-4].reshape(memory.shape)
    with pytest.raises(ValueError, match="out"):
        manyhead.attention(q, memory, memory, out=out)


def test_the_good_call_behind_all_these():
    assert manyhead.attention(Q, K, V).shape == (2, 4, 3, 6)


def test_unknown_arguments():
    with pytest.raises(TypeError, match="dropout"):
        manyhead.attention(Q, K, V, dropout=0.1)
    with pytest.raises(TypeError):
        manyhead.attention(Q, K, V, 0.5)


def test_an_error_does_not_spoil_later_calls():
    before = manyhead.attention(Q, K, V)
    for _ in range(3):
        with pytest.raises(ValueError, match="seqused_k"):
            manyhead.attention(Q, K, V, seqused_k=[0, 9])
    np.testing.assert_array_equal(manyhead.attention(Q, K, V), before)


def test_no_memory_is_an_error_of_two_kinds():
    with pytest.raises(MemoryError) as caught:
        _library.raise_for(_abi.OUT_OF_MEMORY)
    assert type(caught.value) is manyhead.OutOfMemory and isinstance(caught.value, manyhead.Error)
    assert pickle.loads(pickle.dumps(caught.value)).status == _abi.OUT_OF_MEMORY
    with pytest.raises(manyhead.Error) as caught:
        _library.raise_for(_abi.UNSUPPORTED)
    assert type(caught.value) is manyhead.Error


@pytest.mark.parametrize("change", [
    {"causal": 1.0}, {"fast_exp": 1.0}, {"return_lse": 1.0}, {"return_column_sums": 1.0}, {"window": (1.0, 0)},
    {"window": (1, 0.0)}, {"scale": 1 + 0j}, {"softcap": Decimal(1)},
], ids=str)  # fmt: skip
def test_what_equals_an_option_of_a_kept_plan_is_as_wrong_as_ever(change):
    options = {"causal": True, "window": (1, 0), "align": "top_left", "scale": 1, "softcap": 1, "fast_exp": True}
    options |= {"return_lse": True, "return_column_sums": True}
    for _ in range(2):
        with pytest.raises(TypeError, match=next(iter(change))):
            manyhead.attention(Q, K, V, **options | change)
        manyhead.attention(Q, K, V, **options)


def test_error_has_the_status():
    error = manyhead.Error("text", 3)
    assert isinstance(error, RuntimeError) and error.status == 3 and str(error) == "text"
    assert manyhead.Error.__module__ == "manyhead"


def test_errors_travel_between_processes():
    error = manyhead.Error("text", 3)
    error.add_note("while testing")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is manyhead.Error and other.status == 3 and str(other) == "text"
        assert other.__notes__ == ["while testing"]
