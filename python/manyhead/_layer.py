"""manyhead.MultiHeadAttention: the layer, with its projections."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import byref
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat, TypedDict, Unpack

import numpy as np

from . import _abi
from ._arrays import (
    CODES,
    address,
    boolean,
    detached,
    element_strides,
    float_type,
    floats,
    integer,
    new,
    number,
    to_real,
    to_type,
    type_name,
    view,
    wrap,
    writable,
)
from ._exec import make_exec
from ._library import Immutable, check, lib
from ._plan import as_arrays, gather, make_window, place, real_type, result_type, split_offset, spread
from ._weights import SafeTensors, find

_LAYOUTS = {"out_in": "(outputs, inputs)", "in_out": "(inputs, outputs)", "per_head": "(heads, inputs, head_dim)"}
_RESULT = result_type(("out", "weights"))


class _Options(NamedTuple):
    causal: bool
    align: str | None
    q_offset: int | None
    window: tuple[int, int] | None
    softcap: SupportsFloat
    fast_exp: bool


class _Rest(TypedDict, total=False):
    """What the constructor takes besides weights, their layout and num_heads."""

    num_kv_heads: int | None
    add_zero_attn: bool
    scale: SupportsFloat | None
    dtype: Any


class MultiHeadAttention(Immutable):
    """Multi-head attention with its projections: concat(heads) w_o^T + b_o, head = attention(x_q w_q^T + b_q, ...).

    The weights are packed once, here; the arrays are not needed afterwards. (With AMX those of 128 x 128 and more are
    kept twice in float32 and float16, in 2.5 and 3 times their size.) A layer is immutable and can be called from any
    number of threads at once.
    In float16 and bfloat16 sums are of float32; what is projected, the heads' results and out are rounded.

    Args:
        w_q, w_k, w_v, w_o: weight matrices of any float type; that of w_q is the layer's.
            weight_layout="out_in": (heads * head_dim, in) and (out, heads * v_dim), as torch.nn.Linear has them;
            "in_out": the transposed; "per_head": (heads, in, head_dim), and w_o (heads * v_dim, out).
            Any strides. Without w_o there is no output projection: out is the concatenation of the heads.
        in_proj: instead of w_q, w_k and w_v: the three "out_in" matrices one below the other.
        b_q, b_k, b_v, b_o, in_proj_bias: biases, each may be left out.
        bias_k, bias_v: one more, learned, key and value, which every query attends; as torch.nn.MultiheadAttention.
        add_zero_attn: one more key and value of zeros, which every query attends.
        num_heads: heads of the queries.
        num_kv_heads: heads of keys and values; default num_heads, which it must divide.
        scale: factor of the scores; default 1 / sqrt(head_dim).
        dtype: the layer's type, of NumPy or torch or a name ("bfloat16"); the weights are converted to it. Default that
            of w_q.

    Raises:
        ValueError: sizes that do not fit together. TypeError: arguments of a wrong type. manyhead.OutOfMemory.

    Example:
        layer = manyhead.MultiHeadAttention.from_safetensors("model.safetensors", "encoder.layer.0.attention.", 12)
        out, weights = layer(x, key_mask=mask, need_weights=True)
    """

    def __init__(
        self,
        w_q: Any = None,
        w_k: Any = None,
        w_v: Any = None,
        w_o: Any = None,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        in_proj: Any = None,
        b_q: Any = None,
        b_k: Any = None,
        b_v: Any = None,
        b_o: Any = None,
        in_proj_bias: Any = None,
        bias_k: Any = None,
        bias_v: Any = None,
        add_zero_attn: bool = False,
        weight_layout: str = "out_in",
        scale: SupportsFloat | None = None,
        dtype: Any = None,
    ) -> None:
        self._handle = None
        if weight_layout not in _LAYOUTS:
            raise ValueError(f"weight_layout is {weight_layout!r}, must be one of {', '.join(map(repr, _LAYOUTS))}")
        heads = integer(num_heads, "num_heads")
        kv_heads = heads if num_kv_heads is None else integer(num_kv_heads, "num_kv_heads")
        if heads < 1:
            raise ValueError(f"num_heads is {heads}, must be at least 1")
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"num_kv_heads is {kv_heads}, must be at least 1 and divide num_heads = {heads}")
        matrices = {"w_q": w_q, "w_k": w_k, "w_v": w_v}
        if in_proj is not None:
            if any(x is not None for x in matrices.values()) or weight_layout != "out_in":
                raise ValueError('in_proj takes the place of w_q, w_k and w_v, with weight_layout="out_in"')
            matrices = dict(zip(matrices, _split(_weight(in_proj, "in_proj"), heads, kv_heads), strict=True))
        for name, x in matrices.items():
            if x is None:
                raise TypeError(f"{name} is missing: give w_q, w_k and w_v, or in_proj")
        self.dtype = float_type(_weight(matrices["w_q"], "w_q").dtype if dtype is None else dtype, "dtype")

        q = self._per_head(matrices["w_q"], "w_q", heads, weight_layout)
        k = self._per_head(matrices["w_k"], "w_k", kv_heads, weight_layout)
        v = self._per_head(matrices["w_v"], "w_v", kv_heads, weight_layout)
        if k.shape[1] != q.shape[1]:
            raise ValueError(f"w_k has head_dim {k.shape[1]}, must be that of w_q: {q.shape[1]}")
        head_dim, v_dim = q.shape[1], v.shape[1]
        o = None
        if w_o is not None:
            o = self._real(w_o, "w_o")
            o = o if weight_layout == "out_in" else o.T
            if o.ndim != 2 or o.shape[1] != heads * v_dim:
                raise ValueError(f"w_o has shape {np.shape(w_o)}, must join {heads} heads of {v_dim} values")
        elif b_o is not None:
            raise ValueError("b_o is given without w_o")
        if in_proj_bias is not None:
            if any(x is not None for x in (b_q, b_k, b_v)):
                raise ValueError("in_proj_bias takes the place of b_q, b_k and b_v")
            sizes = np.cumsum([heads * head_dim, kv_heads * head_dim, kv_heads * v_dim])
            joined = self._vector(in_proj_bias, "in_proj_bias", int(sizes[2]))
            b_q, b_k, b_v = joined[: sizes[0]], joined[sizes[0] : sizes[1]], joined[sizes[1] :]
        if (bias_k is None) != (bias_v is None):
            raise ValueError("bias_k and bias_v go together")
        vectors = {
            "b_q": (b_q, heads * head_dim),
            "b_k": (b_k, kv_heads * head_dim),
            "b_v": (b_v, kv_heads * v_dim),
            "b_o": (b_o, 0 if o is None else o.shape[0]),
            "bias_k": (bias_k, kv_heads * head_dim),
            "bias_v": (bias_v, kv_heads * v_dim),
        }
        arrays = {name: self._vector(x, name, size) for name, (x, size) in vectors.items() if x is not None}

        weights = _abi.MhaWeights(ctypes.sizeof(_abi.MhaWeights), CODES[self.dtype])
        weights.embed_dim, weights.k_embed_dim, weights.v_embed_dim = q.shape[2], k.shape[2], v.shape[2]
        weights.out_dim = heads * v_dim if o is None else o.shape[0]
        weights.heads, weights.kv_heads, weights.head_dim, weights.v_dim = heads, kv_heads, head_dim, v_dim
        weights.flags = _abi.FLAG_STRIDES
        for name, array in (("w_q", q), ("w_k", k), ("w_v", v), ("w_o", o)):
            if array is not None:
                setattr(weights, name, address(array))
                getattr(weights, name + "_strides")[:] = element_strides(array)
        for name, array in arrays.items():
            setattr(weights, name, address(array))
        weights.add_zero_attn = boolean(add_zero_attn, "add_zero_attn")
        if scale is not None:
            weights.flags |= _abi.FLAG_SCALE
            weights.scale = number(scale, "scale")
        for name in ("embed_dim", "k_embed_dim", "v_embed_dim", "out_dim", "head_dim", "v_dim"):
            if getattr(weights, name) == 0:  # which C would take for its default
                raise ValueError(f"{name} is 0, must be at least 1")
        handle = ctypes.c_void_p()
        check(lib.mh_mha_create(byref(weights), byref(handle)))
        self._handle = handle.value
        self.num_heads, self.num_kv_heads, self.head_dim, self.v_dim = heads, kv_heads, head_dim, v_dim
        self.embed_dim, self.k_embed_dim, self.v_embed_dim = q.shape[2], k.shape[2], v.shape[2]
        self.out_dim = weights.out_dim
        self._extra_keys = (bias_k is not None) + weights.add_zero_attn

    def __del__(self, destroy: Any = lib.mh_mha_destroy) -> None:
        if getattr(self, "_handle", None):
            destroy(self._handle)

    @classmethod
    def from_state_dict(
        cls, mapping: Mapping[str, Any], prefix: str = "", *, num_heads: int, **options: Unpack[_Rest]
    ) -> MultiHeadAttention:
        """A layer from weights with known names, each of which starts with `prefix`; other names are not looked at.

        torch.nn.MultiheadAttention: in_proj_weight (or q_proj_weight, k_proj_weight, v_proj_weight), in_proj_bias,
        out_proj.weight, out_proj.bias, bias_k, bias_v. BERT: [attention.]self.query.weight, .key, .value, .bias, and
        [attention.]output.dense. Also q_proj, k_proj, v_proj and out_proj or o_proj; query, key, value, out;
        W_q, W_k, W_v, W_o with or without .weight, biases b_q, ... or W_q.bias, .... All matrices are (out, in).

        Args:
            mapping: names to arrays or tensors: a state_dict, a dict, an .npz file.
            options: num_kv_heads, add_zero_attn, scale, dtype as in the constructor.
        """
        return cls(num_heads=num_heads, **find(mapping, prefix), **options)

    @classmethod
    def from_safetensors(
        cls, path: str | Path, prefix: str, num_heads: int, **options: Unpack[_Rest]
    ) -> MultiHeadAttention:
        """A layer from a safetensors file; names and options as in from_state_dict. Needs the package safetensors, for
        weights in bfloat16 also ml_dtypes: `pip install 'manyhead[safetensors]'`."""
        return cls.from_state_dict(SafeTensors(path), prefix, num_heads=num_heads, **options)

    def __call__(
        self,
        x_q: Any,
        x_k: Any = None,
        x_v: Any = None,
        *,
        attn_mask: Any = None,
        attn_bias: Any = None,
        key_mask: Any = None,
        seqused_k: Any = None,
        causal: bool = False,
        align: str | None = None,
        q_offset: Any = None,
        window: tuple[int, int] | None = None,
        window_left: int | None = None,
        window_right: int | None = None,
        softcap: SupportsFloat = 0.0,
        fast_exp: bool = False,
        need_weights: bool = False,
        average_weights: bool = False,
        out: Any = None,
        threads: int | None = None,
        _like: Any = None,
    ) -> Any:
        """Runs the layer.

        Args:
            x_q: (batch, q_len, embed_dim), of the layer's type, as is the result; any strides.
            x_k: (batch, kv_len, k_embed_dim); default x_q, self-attention.
            x_v: (batch, kv_len, v_embed_dim); default x_k.
            attn_mask, attn_bias, key_mask, seqused_k, causal, align, q_offset, window, softcap, fast_exp: as
                in manyhead.attention; True = may attend. They do not restrict bias_k / bias_v and zero attention.
            need_weights: also return the attention weights; manyhead.attention's return_weights=True.
            average_weights: with need_weights: averaged over the heads; manyhead.attention's return_weights="mean".
            out: where to write, (batch, q_len, out_dim). threads: as in attention.

        Returns:
            out (batch, q_len, out_dim), or, with need_weights, a named tuple (out, weights); weights are
            (batch, heads, q_len, kv_len + extra keys), or (batch, q_len, ...) when averaged; float64 if the layer is,
            else float32.
        """
        window = make_window(window, window_left, window_right)
        q_offset, offsets = split_offset(q_offset)
        seen = gather(self.dtype, attn_mask, attn_bias, key_mask, seqused_k, offsets)
        inputs = as_arrays(seen)
        q = self._tokens(x_q, "x_q", self.embed_dim)
        k = q if x_k is None else self._tokens(x_k, "x_k", self.k_embed_dim)
        v = k if x_v is None else self._tokens(x_v, "x_v", self.v_embed_dim)
        for name, x, size, wanted in (
            ("x_k", k, k.shape[0], q.shape[0]),
            ("x_v", v, v.shape[0], q.shape[0]),
            ("x_v", v, v.shape[1], k.shape[1]),
        ):
            if size != wanted:
                others = f"x_q {q.shape}" if name == "x_k" else f"x_q {q.shape}, x_k {k.shape}"
                raise ValueError(f"{name} has shape {x.shape}, {others}: {size} must be {wanted}")
        if k.shape[2] != self.k_embed_dim or v.shape[2] != self.v_embed_dim:
            raise ValueError(
                f"x_k and x_v must end in {self.k_embed_dim} and {self.v_embed_dim}, not {k.shape[2]} and {v.shape[2]}"
            )
        batch, q_len, kv_len = q.shape[0], q.shape[1], k.shape[1]
        shape = (batch, q_len, self.out_dim)
        result = new(shape, q.dtype, x_q) if out is None else writable(out, "out")
        if result.shape != shape:
            raise ValueError(f"out has shape {result.shape}, must be {shape}")
        self._check_type(result, "out")

        call = _abi.MhaCall(ctypes.sizeof(_abi.MhaCall), batch, q_len, kv_len)
        call.flags = _abi.FLAG_STRIDES
        place(call, _Options(causal, align, q_offset, window, softcap, fast_exp), inputs)
        spread(call, inputs, (batch, self.num_heads, q_len, kv_len))
        for name, array in (("x_q", q), ("x_k", k), ("x_v", v), ("out", result)):
            setattr(call, name, address(array))
            getattr(call, name + "_strides")[:] = element_strides(array)
        for name, (_, _, begin) in seen.items():
            setattr(call, "q_offsets" if name == "q_offset" else name, begin)
        weights = None
        average = boolean(average_weights, "average_weights")
        if boolean(need_weights, "need_weights"):
            rows = (batch, q_len, kv_len + self._extra_keys)
            weights = new(rows if average else (batch, self.num_heads, *rows[1:]), real_type(self.dtype), x_q)
            field = "mean_weights" if average else "weights"
            setattr(call, field, address(weights))
            getattr(call, field + "_strides")[:] = element_strides(weights)
        check(lib.mh_mha_run(self._handle, byref(call), make_exec(x_q if _like is None else _like, threads)))
        out = wrap(result, x_q) if out is None else out
        return out if weights is None else _RESULT(out, wrap(weights, x_q))

    def forward_torch(
        self,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        batch_first: bool = False,
    ) -> tuple[Any, Any]:
        """The call of torch.nn.MultiheadAttention, with its conventions, which are not those of the rest of manyhead:
        in boolean masks **True means "may not attend"**, and arrays are (len, batch, embed) unless batch_first.

        Args:
            query, key, value: (len, batch, embed), (batch, len, embed) with batch_first, or unbatched (len, embed).
            key_padding_mask: (batch, kv_len) or (kv_len,); bool, True = ignore this key, or floats, added.
            attn_mask: (q_len, kv_len) or (batch * heads, q_len, kv_len); bool, True = may not attend, or floats, added.
            is_causal: queries attend keys j <= i. In torch a hint about attn_mask; here it masks by itself too.

        Returns:
            (out, weights); out as query; weights are None without need_weights, else (batch, q_len, kv_len), averaged
            over the heads, or (batch, heads, q_len, kv_len) without average_attn_weights; unbatched without batch. They
            are of float32 where the layer has 16 bits, not, as torch's, of its type.
        """
        arrays = [floats(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value"))]
        unbatched = arrays[0].ndim == 2
        if any(x.ndim != (2 if unbatched else 3) for x in arrays):
            raise ValueError("query, key and value must all have 3 dimensions, or all 2 (unbatched)")
        if unbatched:
            arrays = [x[None] for x in arrays]
        elif not batch_first:
            arrays = [x.swapaxes(0, 1) for x in arrays]
        batch, q_len, kv_len = arrays[0].shape[0], arrays[0].shape[1], arrays[1].shape[1]
        options: dict[str, Any] = {}
        bias = None
        if attn_mask is not None:
            mask = view(attn_mask, "attn_mask")
            if mask.ndim == 3:
                if mask.shape != (batch * self.num_heads, q_len, kv_len):
                    wanted = (batch * self.num_heads, q_len, kv_len)
                    raise ValueError(f"attn_mask has shape {mask.shape}, must be {wanted} or {wanted[1:]}")
                mask = mask.reshape(batch, self.num_heads, q_len, kv_len)
            elif mask.shape != (q_len, kv_len):
                raise ValueError(f"attn_mask has shape {mask.shape}, must be {(q_len, kv_len)} or 3-dimensional")
            if mask.dtype == np.bool_:
                options["attn_mask"] = ~mask
            else:
                bias = to_real(floats(mask, "attn_mask"), real_type(self.dtype))
        if key_padding_mask is not None:
            mask = view(key_padding_mask, "key_padding_mask")
            mask = mask[None] if unbatched and mask.ndim == 1 else mask
            if mask.shape != (batch, kv_len):
                raise ValueError(f"key_padding_mask has shape {mask.shape}, must be {(batch, kv_len)}")
            if mask.dtype == np.bool_:
                options["key_mask"] = ~mask
            else:  # two additive masks: their sum
                padding = to_real(floats(mask, "key_padding_mask"), real_type(self.dtype))[:, None, None, :]
                bias = padding if bias is None else bias + padding
        align = "top_left" if boolean(is_causal, "is_causal") else None
        result = self(
            *arrays,
            attn_bias=bias,
            causal=is_causal,
            align=align,
            need_weights=need_weights,
            average_weights=average_attn_weights,
            _like=query,  # on its threads
            **options,
        )
        out, weights = result if need_weights else (result, None)
        out = out[0] if unbatched else out if batch_first else out.swapaxes(0, 1)
        if weights is not None:
            weights = wrap(weights[0] if unbatched else weights, query)
        return wrap(out, query), weights

    def __repr__(self) -> str:
        return (
            f"<manyhead.MultiHeadAttention {self.embed_dim} -> {self.out_dim}, {self.num_heads} heads"
            f"{'' if self.num_heads == self.num_kv_heads else f' on {self.num_kv_heads} kv heads'}"
            f" of {self.head_dim}, {type_name(self.dtype)}>"
        )

    def _real(self, x: Any, name: str) -> np.ndarray:
        return to_type(_weight(x, name), self.dtype)

    def _per_head(self, x: Any, name: str, heads: int, layout: str) -> np.ndarray:
        """A projection as (heads, dim, in), a view."""
        array = self._real(x, name)
        if array.ndim != (3 if layout == "per_head" else 2):
            raise ValueError(f"{name} has shape {array.shape}, which is not {layout!r}: {_LAYOUTS[layout]}")
        if layout == "per_head":
            if array.shape[0] != heads:
                raise ValueError(f"{name}.shape[0] is {array.shape[0]}, must be the number of heads = {heads}")
            return array.swapaxes(1, 2)
        array = array.T if layout == "in_out" else array
        if array.shape[0] % heads:
            raise ValueError(f"{name} has {array.shape[0]} outputs, which {heads} heads cannot share evenly")
        # Splitting a dimension never needs a copy.
        return array.reshape(heads, array.shape[0] // heads, array.shape[1])

    def _vector(self, x: Any, name: str, size: int) -> np.ndarray:
        array = np.ascontiguousarray(self._real(x, name)).reshape(-1)  # torch keeps bias_k as (1, 1, embed)
        if array.size != size:
            raise ValueError(f"{name} has {array.size} elements, must have {size}")
        return array

    def _tokens(self, x: Any, name: str, dim: int) -> np.ndarray:
        array = floats(x, name)
        if array.ndim != 3 or array.shape[2] != dim:
            raise ValueError(f"{name} has shape {array.shape}, must be (batch, len, {dim})")
        self._check_type(array, name)
        return array

    def _check_type(self, array: np.ndarray, name: str) -> None:
        if CODES[array.dtype] != CODES[self.dtype]:
            got, own = type_name(array.dtype), type_name(self.dtype)
            raise TypeError(
                f"{name} has dtype {got}, must be that of the layer: {own}; "
                f'convert it, or make the layer with dtype="{got}"'
            )


def _weight(x: Any, name: str) -> np.ndarray:
    """A weight as floats; what a parameter is now, as nothing learns here."""
    return floats(detached(x), name)


def _split(array: np.ndarray, heads: int, kv_heads: int) -> list[np.ndarray]:
    """The three matrices in in_proj; v_dim is head_dim."""
    if array.ndim != 2 or array.shape[0] % (heads + 2 * kv_heads):
        raise ValueError(
            f"in_proj has shape {array.shape}; its rows must be shared evenly by {heads} + 2 * {kv_heads} heads"
        )
    head_dim = array.shape[0] // (heads + 2 * kv_heads)
    return np.split(array, [heads * head_dim, (heads + kv_heads) * head_dim])
