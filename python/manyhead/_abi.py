"""The structs, numbers and functions of include/manyhead/manyhead.h, as ctypes sees them.

A mirror and nothing else: field order, widths and names are those of the header, which explains them.
python/tests/test_abi.py compares every size and offset with a C compiler.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint32, c_void_p

OK, INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY, INTERNAL_ERROR = range(5)

ALIGN_UNSET, ALIGN_TOP_LEFT, ALIGN_BOTTOM_RIGHT, ALIGN_OFFSET = range(4)
ALIBI_ABS, ALIBI_SIGNED = range(2)
LSE_NATURAL, LSE_BASE2 = range(2)
SCORES_RAW, SCORES_CAPPED, SCORES_BIASED = range(3)
INDEX_I32, INDEX_I64 = range(2)
FORMAT_LINE, FORMAT_JSON = range(2)
PROFILE_SUMMARY, PROFILE_TRACE = range(2)
PROFILE_COUNTERS = 1

FLAG_SCALE, FLAG_STRIDES, FLAG_WINDOW, FLAG_FAST_EXP = 1, 2, 4, 8

INPUT_MASK, INPUT_BIAS, INPUT_KEY_MASK, INPUT_SEQUSED_K = 1, 2, 4, 8
INPUT_Q_OFFSET, INPUT_ALIBI, INPUT_SINKS = 16, 32, 64

OUTPUT_LSE, OUTPUT_WEIGHTS, OUTPUT_MEAN_WEIGHTS, OUTPUT_COLUMN_SUMS, OUTPUT_SCORES = 1, 2, 4, 8, 16


class Problem(Structure):
    """mh_problem"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("batch", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("q_len", c_int64),
        ("kv_len", c_int64),
        ("head_dim", c_int64),
        ("v_dim", c_int64),
        ("dtype", c_int32),
        ("flags", c_uint32),
        ("inputs", c_uint32),
        ("outputs", c_uint32),
        ("q_strides", c_int64 * 4),
        ("k_strides", c_int64 * 4),
        ("v_strides", c_int64 * 4),
        ("out_strides", c_int64 * 4),
        ("scale", c_double),
        ("softcap", c_double),
        ("causal", c_int32),
        ("align", c_int32),
        ("q_offset", c_int64),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("alibi_mode", c_int32),
        ("lse_base", c_int32),
        ("scores_stage", c_int32),
        ("bias_dtype", c_int32),
        ("index_type", c_int32),
        ("reserved0", c_int32),
        ("mask_strides", c_int64 * 4),
        ("bias_strides", c_int64 * 4),
        ("key_mask_strides", c_int64 * 2),
        ("alibi_batch_stride", c_int64),
        ("lse_strides", c_int64 * 3),
        ("weights_strides", c_int64 * 4),
        ("mean_weights_strides", c_int64 * 3),
        ("column_sums_strides", c_int64 * 3),
        ("scores_strides", c_int64 * 4),
    ]


class Tensors(Structure):
    """mh_tensors"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("mask", c_void_p),
        ("bias", c_void_p),
        ("key_mask", c_void_p),
        ("seqused_k", c_void_p),
        ("q_offset", c_void_p),
        ("alibi_slopes", c_void_p),
        ("sinks", c_void_p),
        ("lse", c_void_p),
        ("weights", c_void_p),
        ("mean_weights", c_void_p),
        ("column_sums", c_void_p),
        ("scores", c_void_p),
    ]


# Field of mh_tensors -> its bit in mh_problem.inputs or mh_problem.outputs.
INPUTS = {
    "mask": INPUT_MASK,
    "bias": INPUT_BIAS,
    "key_mask": INPUT_KEY_MASK,
    "seqused_k": INPUT_SEQUSED_K,
    "q_offset": INPUT_Q_OFFSET,
    "alibi_slopes": INPUT_ALIBI,
    "sinks": INPUT_SINKS,
}
OUTPUTS = {
    "lse": OUTPUT_LSE,
    "weights": OUTPUT_WEIGHTS,
    "mean_weights": OUTPUT_MEAN_WEIGHTS,
    "column_sums": OUTPUT_COLUMN_SUMS,
    "scores": OUTPUT_SCORES,
}


class OpenMP(Structure):
    """mh_openmp"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("parallel", c_void_p),
        ("max_threads", c_void_p),
        ("thread_num", c_void_p),
        ("num_threads", c_void_p),
    ]


class Exec(Structure):
    """mh_exec, and what keeps what it points to where it is."""

    keeps: object = None

    _fields_ = [
        ("struct_size", c_size_t),
        ("threads", c_int32),
        ("reserved0", c_int32),
        ("parallel_for", c_void_p),
        ("parallel_ctx", c_void_p),
        ("workspace", c_void_p),
        ("workspace_size", c_size_t),
        ("openmp", c_void_p),
    ]


class Merge(Structure):
    """mh_merge"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("states", c_int64),
        ("batch", c_int64),
        ("heads", c_int64),
        ("q_len", c_int64),
        ("v_dim", c_int64),
        ("dtype", c_int32),
        ("flags", c_uint32),
        ("lse_base", c_int32),
        ("reserved0", c_int32),
        ("outs_strides", c_int64 * 5),
        ("lses_strides", c_int64 * 4),
        ("out_strides", c_int64 * 4),
        ("lse_strides", c_int64 * 3),
        ("exec", c_void_p),
    ]


class MhaWeights(Structure):
    """mh_mha_weights"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("dtype", c_int32),
        ("layout", c_int32),
        ("embed_dim", c_int64),
        ("k_embed_dim", c_int64),
        ("v_embed_dim", c_int64),
        ("out_dim", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("v_dim", c_int64),
        ("w_q", c_void_p),
        ("w_k", c_void_p),
        ("w_v", c_void_p),
        ("w_o", c_void_p),
        ("in_proj", c_void_p),
        ("b_q", c_void_p),
        ("b_k", c_void_p),
        ("b_v", c_void_p),
        ("b_o", c_void_p),
        ("in_proj_bias", c_void_p),
        ("bias_k", c_void_p),
        ("bias_v", c_void_p),
        ("add_zero_attn", c_int32),
        ("flags", c_uint32),
        ("scale", c_double),
        ("w_q_strides", c_int64 * 3),
        ("w_k_strides", c_int64 * 3),
        ("w_v_strides", c_int64 * 3),
        ("w_o_strides", c_int64 * 2),
    ]


class MhaCall(Structure):
    """mh_mha_call"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("batch", c_int64),
        ("q_len", c_int64),
        ("kv_len", c_int64),
        ("causal", c_int32),
        ("align", c_int32),
        ("q_offset", c_int64),
        ("flags", c_uint32),
        ("bias_dtype", c_int32),
        ("index_type", c_int32),
        ("reserved0", c_int32),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("softcap", c_double),
        ("x_q", c_void_p),
        ("x_k", c_void_p),
        ("x_v", c_void_p),
        ("out", c_void_p),
        ("mask", c_void_p),
        ("bias", c_void_p),
        ("key_mask", c_void_p),
        ("seqused_k", c_void_p),
        ("q_offsets", c_void_p),
        ("weights", c_void_p),
        ("mean_weights", c_void_p),
        ("x_q_strides", c_int64 * 3),
        ("x_k_strides", c_int64 * 3),
        ("x_v_strides", c_int64 * 3),
        ("out_strides", c_int64 * 3),
        ("mask_strides", c_int64 * 4),
        ("bias_strides", c_int64 * 4),
        ("key_mask_strides", c_int64 * 2),
        ("weights_strides", c_int64 * 4),
        ("mean_weights_strides", c_int64 * 3),
    ]


class ProfileOptions(Structure):
    """mh_profile_options"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("calls", c_int64),
        ("tasks", c_int64),
        ("flags", c_uint32),
        ("reserved0", c_int32),
    ]


# C name -> Python class, for the test that compares sizes and offsets.
STRUCTS: dict[str, type[Structure]] = {
    "mh_problem": Problem,
    "mh_tensors": Tensors,
    "mh_openmp": OpenMP,
    "mh_exec": Exec,
    "mh_merge": Merge,
    "mh_mha_weights": MhaWeights,
    "mh_mha_call": MhaCall,
    "mh_profile_options": ProfileOptions,
}

# Function -> (result, arguments). Pointers to structs are c_void_p: ctypes.byref is the cheapest way to pass one.
FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "mh_status_name": (c_char_p, (c_int32,)),
    "mh_last_error": (c_char_p, ()),
    "mh_version": (c_char_p, ()),
    "mh_version_number": (c_int32, ()),
    "mh_dtype_count": (c_int32, ()),
    "mh_dtype_name": (c_char_p, (c_int32,)),
    "mh_dtype_size": (c_size_t, (c_int32,)),
    "mh_isa_count": (c_int32, ()),
    "mh_isa_name": (c_char_p, (c_int32,)),
    "mh_isa_supported": (c_int32, (c_int32,)),
    "mh_isa_current": (c_char_p, ()),
    "mh_set_isa": (c_int32, (c_char_p,)),
    "mh_threads": (c_int32, ()),
    "mh_set_threads": (c_int32, (c_int32,)),
    "mh_machine_describe": (c_int32, (c_char_p, c_size_t, POINTER(c_size_t))),
    "mh_plan_create": (c_int32, (c_void_p, POINTER(c_void_p))),
    "mh_plan_destroy": (None, (c_void_p,)),
    "mh_plan_workspace_size": (c_size_t, (c_void_p, c_int32)),
    "mh_plan_run": (c_int32, (c_void_p, c_void_p, c_void_p)),
    "mh_attention": (c_int32, (c_void_p, c_void_p, c_void_p)),
    "mh_plan_describe": (c_int32, (c_void_p, c_int32, c_char_p, c_size_t, POINTER(c_size_t))),
    "mh_problem_parse": (c_int32, (c_char_p, c_void_p, POINTER(c_size_t))),
    "mh_probe_arithmetic": (c_int32, (c_char_p, c_int32, c_int32, c_double, POINTER(c_double))),
    "mh_probe_read": (c_int32, (c_char_p, c_size_t, c_int32, c_double, POINTER(c_double))),
    "mh_probe_clock": (c_int32, (c_double, POINTER(c_double))),
    "mh_plan_measure": (
        c_int32,
        (c_void_p, c_void_p, c_void_p, c_double, c_int64, POINTER(c_double), POINTER(c_int64)),
    ),
    "mh_profile_begin": (c_int32, (c_void_p,)),
    "mh_profile_end": (c_int32, ()),
    "mh_profile_describe": (c_int32, (c_int32, c_char_p, c_size_t, POINTER(c_size_t))),
    "mh_merge_states": (c_int32, (c_void_p,) * 5),
    "mh_merge_state": (c_int32, (c_void_p,) * 7),
    "mh_mha_create": (c_int32, (c_void_p, POINTER(c_void_p))),
    "mh_mha_destroy": (None, (c_void_p,)),
    "mh_mha_run": (c_int32, (c_void_p, c_void_p, c_void_p)),
}


def declare(library: ctypes.CDLL) -> None:
    """Gives every function of the library its result and argument types; AttributeError names a missing one."""
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
