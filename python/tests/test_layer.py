"""manyhead.MultiHeadAttention against the float64 reference: forms of weights, options, masks, names, files, torch."""

from __future__ import annotations

import struct
import sys

import manyhead
import ml_dtypes
import numpy as np
import pytest
import reference
from interpreter import run_python
from manyhead._arrays import BF16, to_type
from manyhead._weights import SafeTensors
from problems import TOLERANCE, relayout

F32, F64 = np.float32, np.float64
TYPES = {"f32": F32, "f64": F64, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
# Where results are not of the layer's 16 bits, what they are made of is.
ROUNDED = {"f16": 2e-3, "bf16": 1.6e-2}


def weights(heads=3, kv_heads=None, head_dim=4, v_dim=None, embed=12, k_embed=None, v_embed=None, out=None, bias=True,
            dtype=F32, seed=0):  # fmt: skip
    rng = np.random.default_rng(seed)
    kv_heads, v_dim, k_embed = kv_heads or heads, v_dim or head_dim, k_embed or embed
    v_embed, out = v_embed or k_embed, out or embed
    sizes = {"q": (heads * head_dim, embed), "k": (kv_heads * head_dim, k_embed), "v": (kv_heads * v_dim, v_embed),
             "o": (out, heads * v_dim)}  # fmt: skip
    given = {f"w_{part}": (rng.standard_normal(size) / np.sqrt(size[1])).astype(dtype) for part, size in sizes.items()}
    if bias:
        given |= {f"b_{part}": rng.standard_normal(size[0]).astype(dtype) for part, size in sizes.items()}
    return given | {"num_heads": heads, "num_kv_heads": kv_heads}


def tokens(*shape, dtype=F32, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def close(result, expected, dtype="f32", factor=2):
    tolerance = factor * max(TOLERANCE[dtype][0], ROUNDED.get(dtype, 0))
    assert result.shape == expected.shape
    np.testing.assert_allclose(np.asarray(result, F64), expected, tolerance, tolerance)


def check(given, x_q, x_k, x_v, dtype="f32", layer=None, **options):
    layer = layer or manyhead.MultiHeadAttention(**given)
    result = layer(x_q, x_k, x_v, need_weights=True, **options)
    expected = reference.multi_head_attention(x_q, x_k, x_v, **given, **options)
    close(result.out, expected[0], dtype)
    close(result.weights, expected[1], dtype)
    mean = layer(x_q, x_k, x_v, need_weights=True, average_weights=True, **options)
    close(mean.weights, expected[1].mean(axis=1), dtype)
    out = layer(x_q, x_k, x_v, **options)
    assert isinstance(out, np.ndarray) and out.dtype == x_q.dtype
    assert result.weights.dtype == mean.weights.dtype == (F64 if dtype == "f64" else F32)
    close(out, expected[0], dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", [
    {},
    {"heads": 1, "head_dim": 1},
    {"heads": 4, "kv_heads": 2, "head_dim": 5, "v_dim": 7, "embed": 10, "k_embed": 6, "v_embed": 9, "out": 11},
    {"heads": 6, "kv_heads": 1, "head_dim": 8, "bias": False},
    {"heads": 2, "head_dim": 64, "embed": 128},
], ids=str)  # fmt: skip
def test_sizes(sizes, dtype):
    numpy_type = TYPES[dtype]
    given = weights(**sizes, dtype=numpy_type)
    x_q = tokens(2, 5, given["w_q"].shape[1], dtype=numpy_type)
    x_k = tokens(2, 7, given["w_k"].shape[1], dtype=numpy_type, seed=2)
    x_v = tokens(2, 7, given["w_v"].shape[1], dtype=numpy_type, seed=3)
    check(given, x_q, x_k, x_v, dtype)


def test_self_attention_and_attributes():
    given = weights(heads=4, kv_heads=2)
    layer = manyhead.MultiHeadAttention(**given)
    x = tokens(2, 6, 12)
    np.testing.assert_array_equal(layer(x), layer(x, x, x))
    np.testing.assert_array_equal(layer(x, x[:, :3]), layer(x, x[:, :3], x[:, :3]))
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_dim) == (4, 2, 4, 4)
    assert (layer.embed_dim, layer.k_embed_dim, layer.v_embed_dim, layer.out_dim) == (12, 12, 12, 12)
    assert layer.dtype == F32 and "4 heads on 2 kv heads of 4" in repr(layer)


@pytest.mark.parametrize("option", [
    {"causal": True},
    {"causal": True, "q_offset": -2},
    {"causal": True, "q_offset": np.array([1, -1])},
    {"window": (2, 0)},
    {"window_left": 1, "window_right": 3},
    {"softcap": 0.7},
    {"attn_mask": np.random.default_rng(5).random((6, 6)) < 0.6},
    {"attn_mask": np.random.default_rng(5).random((2, 3, 6, 6)) < 0.6, "causal": True},
    {"attn_bias": np.random.default_rng(5).standard_normal((3, 1, 6))},
    {"attn_mask": np.random.default_rng(5).standard_normal((3, 6, 6)).astype(np.float16)},
    {"key_mask": np.random.default_rng(5).random((2, 6)) < 0.6},
    {"seqused_k": [4, 2], "causal": True},
    {"seqused_k": [0, 6]},
], ids=lambda option: "-".join(option))  # fmt: skip
@pytest.mark.parametrize("extras", [False, True])
def test_options(option, extras):
    given = weights()
    if extras:
        given |= {"bias_k": tokens(12), "bias_v": tokens(12, seed=4), "add_zero_attn": True}
    x = tokens(2, 6, 12)
    layer = manyhead.MultiHeadAttention(**given)
    plain = dict(option)
    if "window_left" in plain:
        plain = {"window": (plain["window_left"], plain["window_right"])}
    if plain.get("attn_mask") is not None and plain["attn_mask"].dtype == np.float16:
        plain = {"attn_bias": plain["attn_mask"]}
    result = layer(x, need_weights=True, **option)
    expected = reference.multi_head_attention(x, x, x, **given, **plain)
    close(result.out, expected[0])
    close(result.weights, expected[1])


@pytest.mark.parametrize("extras", [{}, {"bias_k": 1, "bias_v": 1}, {"add_zero_attn": True}])
def test_learned_and_zero_keys(extras):
    given = weights(heads=4, kv_heads=2, head_dim=3, v_dim=5)
    given |= {
        name: tokens(2 * (3 if name == "bias_k" else 5)) if name != "add_zero_attn" else x for name, x in extras.items()
    }
    check(given, tokens(2, 5, 12), tokens(2, 4, 12), tokens(2, 4, 12), attn_mask=np.zeros((5, 4), bool))


def test_queries_without_keys_give_the_output_bias():
    given = weights()
    layer = manyhead.MultiHeadAttention(**given)
    x = tokens(2, 3, 12)
    expected = np.broadcast_to(given["b_o"], x.shape)
    np.testing.assert_allclose(layer(x, attn_mask=np.zeros((3, 3), bool)), expected, 1e-6)
    np.testing.assert_allclose(layer(x, x[:, :0]), expected, 1e-6)
    assert layer(x[:0]).shape == (0, 3, 12) and layer(x[:, :0], x).shape == (2, 0, 12)


def test_weights_in_every_layout_give_the_same_layer():
    given = weights(heads=4, kv_heads=2, head_dim=5, v_dim=7, out=9)
    x = tokens(2, 6, 12)
    expected = manyhead.MultiHeadAttention(**given)(x)
    names = ("w_q", "w_k", "w_v", "w_o")
    rng = np.random.default_rng(3)
    in_out = given | {name: np.ascontiguousarray(given[name].T) for name in names}
    per_head = given | {"w_o": np.ascontiguousarray(given["w_o"].T)}
    for name, heads in (("w_q", 4), ("w_k", 2), ("w_v", 2)):
        per_head[name] = np.ascontiguousarray(given[name].reshape(heads, -1, 12).swapaxes(1, 2))
    strided = given | {name: relayout(rng, given[name]) for name in names} | {"b_q": np.repeat(given["b_q"], 2)[::2]}
    for kind, layout in ((in_out, "in_out"), (per_head, "per_head"), (strided, "out_in")):
        np.testing.assert_array_equal(manyhead.MultiHeadAttention(**kind, weight_layout=layout)(x), expected)
    transposed = given | {name: given[name].T for name in names}
    np.testing.assert_array_equal(manyhead.MultiHeadAttention(**transposed, weight_layout="in_out")(x), expected)


def test_joined_weights_and_no_output_projection():
    given = weights(heads=4, kv_heads=2, head_dim=3)
    x = tokens(2, 6, 12)
    joined = {
        "in_proj": np.concatenate([given[f"w_{part}"] for part in "qkv"]),
        "in_proj_bias": np.concatenate([given[f"b_{part}"] for part in "qkv"]),
        "num_heads": 4,
        "num_kv_heads": 2,
    }
    expected = manyhead.MultiHeadAttention(**given)(x)
    layer = manyhead.MultiHeadAttention(**joined, w_o=given["w_o"], b_o=given["b_o"])
    np.testing.assert_array_equal(layer(x), expected)
    heads = manyhead.MultiHeadAttention(**joined)(x)
    close(heads, reference.multi_head_attention(x, x, x, **(given | {"w_o": None, "b_o": None}))[0])


def test_scale_dtype_and_the_callers_arrays():
    given = weights()
    x = tokens(1, 4, 12)
    close(
        manyhead.MultiHeadAttention(**given, scale=0.2)(x),
        reference.multi_head_attention(x, x, x, **given, scale=0.2)[0],
    )
    close(
        manyhead.MultiHeadAttention(**given, scale=0)(x), reference.multi_head_attention(x, x, x, **given, scale=0)[0]
    )
    half = {name: w.astype(ml_dtypes.bfloat16) if name[0] in "wb" else w for name, w in given.items()}
    close(manyhead.MultiHeadAttention(**half, dtype=F32)(x), reference.multi_head_attention(x, x, x, **half)[0])
    for dtype in (np.float16, "float16", ml_dtypes.bfloat16, "bfloat16"):
        layer = manyhead.MultiHeadAttention(**given, dtype=dtype)
        low = ml_dtypes.bfloat16 if "bf" in str(dtype) else np.float16
        assert ("bfloat16" if "bf" in str(dtype) else "float16") in repr(layer)
        same = {name: w.astype(low) if name[0] in "wb" else w for name, w in given.items()}
        result = layer(x.astype(low))
        assert result.dtype == low
        np.testing.assert_array_equal(result, manyhead.MultiHeadAttention(**same)(x.astype(low)))
    layer = manyhead.MultiHeadAttention(**given)
    before = layer(x)
    for name in ("w_q", "w_o", "b_v"):
        given[name][...] = np.nan
    np.testing.assert_array_equal(layer(x), before)


def test_conversion_to_bfloat16_rounds_as_others_do():
    halfway = np.arange(2**16, dtype=np.uint32) << 16
    numbers = np.concatenate([halfway + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001)]).astype(np.uint32).view(F32)
    with np.errstate(invalid="ignore"):
        expected = numbers.astype(ml_dtypes.bfloat16)
    result = to_type(numbers, BF16).view(ml_dtypes.bfloat16)
    real = ~np.isnan(numbers)
    np.testing.assert_array_equal(result[real].view(np.uint16), expected[real].view(np.uint16))
    assert np.isnan(result[~real]).all()


def test_out_strides_and_threads():
    layer = manyhead.MultiHeadAttention(**weights())
    x = tokens(2, 6, 12)
    rng = np.random.default_rng(2)
    expected = layer(x, need_weights=True)
    out = relayout(rng, np.zeros_like(x))
    assert layer(relayout(rng, x), out=out) is out
    np.testing.assert_allclose(out, expected.out, 1e-5, 1e-6)
    for threads in (1, 2, 3):
        result = layer(x, need_weights=True, threads=threads)
        np.testing.assert_array_equal(result.out, expected.out)
        np.testing.assert_array_equal(result.weights, expected.weights)


# ---- names and files ----


def torch_names(given, prefix="", separate=False):
    names = {f"{part}_proj_weight": given[f"w_{part}"] for part in "qkv"}
    if not separate:
        names = {"in_proj_weight": np.concatenate(list(names.values()))}
    names |= {"in_proj_bias": np.concatenate([given[f"b_{part}"] for part in "qkv"]),
              "out_proj.weight": given["w_o"], "out_proj.bias": given["b_o"]}  # fmt: skip
    return {prefix + name: x for name, x in names.items()}


def module_names(given, modules, prefix="", weight=".weight", bias=".bias"):
    names = {module + weight: given[f"w_{part}"] for part, module in zip("qkvo", modules, strict=True)}
    names |= {module + bias: given[f"b_{part}"] for part, module in zip("qkvo", modules, strict=True)}
    return {prefix + name: x for name, x in names.items()} | {prefix + "LayerNorm.weight": np.ones(3, F32)}


SCHEMES = {
    "torch": torch_names,
    "torch separate": lambda given, prefix: torch_names(given, prefix, separate=True),
    "bert": lambda given, prefix: module_names(given, ("self.query", "self.key", "self.value", "output.dense"), prefix),
    "bert layer": lambda given, prefix: module_names(
        given, ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"), prefix
    ),
    "llama": lambda given, prefix: module_names(given, ("q_proj", "k_proj", "v_proj", "o_proj"), prefix),
    "opt": lambda given, prefix: module_names(given, ("q_proj", "k_proj", "v_proj", "out_proj"), prefix),
    "textbook": lambda given, prefix: module_names(given, ("W_q", "W_k", "W_v", "W_o"), prefix),
    "plain": lambda given, prefix: {
        prefix + name.replace("w_", "W_"): x for name, x in given.items() if name[1] == "_"
    },
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("prefix", ["", "encoder.layer.0."])
def test_known_names(scheme, prefix):
    given = weights()
    mapping = SCHEMES[scheme](given, prefix) | {"encoder.layer.1.W_q": np.zeros(3)}
    x = tokens(2, 5, 12)
    layer = manyhead.MultiHeadAttention.from_state_dict(mapping, prefix, num_heads=3)
    np.testing.assert_array_equal(layer(x), manyhead.MultiHeadAttention(**given)(x))


def test_names_with_learned_keys_and_missing_biases():
    given = weights()
    x = tokens(2, 5, 12)
    mapping = torch_names(given) | {"bias_k": tokens(1, 1, 12), "bias_v": tokens(1, 1, 12, seed=4)}
    layer = manyhead.MultiHeadAttention.from_state_dict(mapping, num_heads=3, add_zero_attn=True)
    extra = {"bias_k": mapping["bias_k"].ravel(), "bias_v": mapping["bias_v"].ravel(), "add_zero_attn": True}
    np.testing.assert_array_equal(layer(x), manyhead.MultiHeadAttention(**given, **extra)(x))
    mapping = {f"{part}_proj.weight": given[f"w_{part}"] for part in "qkvo"} | {"q_proj.bias": given["b_q"]}
    plain = {name: w for name, w in given.items() if name[0] != "b"}
    layer = manyhead.MultiHeadAttention.from_state_dict(mapping, num_heads=3)
    np.testing.assert_array_equal(layer(x), manyhead.MultiHeadAttention(**plain, b_q=given["b_q"])(x))


def test_unknown_names():
    mapping = SCHEMES["bert"](weights(), "a.")
    for broken in (mapping, {"b.self.query.weight": 1}, {}, {"b.in_proj_weight": np.zeros((36, 12), F32)}):
        with pytest.raises(ValueError, match="no attention weights under the prefix 'b.'.*self.query"):
            manyhead.MultiHeadAttention.from_state_dict(broken, "b.", num_heads=3)


def test_safetensors(tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    given = weights()
    names = SCHEMES["bert"](given, "encoder.layer.0.attention.")
    path = tmp_path / "model.safetensors"
    save_file(names | {"position_ids": np.arange(4)}, path, {"format": "pt"})
    x = tokens(2, 5, 12)
    layer = manyhead.MultiHeadAttention.from_safetensors(path, "encoder.layer.0.attention.", 3)
    np.testing.assert_array_equal(layer(x), manyhead.MultiHeadAttention(**given)(x))
    with pytest.raises(ValueError, match="no attention weights under the prefix 'decoder'"):
        manyhead.MultiHeadAttention.from_safetensors(path, "decoder", 3)
    save_file({name: x.astype(ml_dtypes.bfloat16) for name, x in names.items()}, path)
    layer = manyhead.MultiHeadAttention.from_safetensors(str(path), "encoder.layer.0.attention.", 3, dtype=F32)
    rounded = {name: w.astype(ml_dtypes.bfloat16).astype(F32) if name[0] in "wb" else w for name, w in given.items()}
    np.testing.assert_array_equal(layer(x), manyhead.MultiHeadAttention(**rounded)(x))


def test_bf16_safetensors_are_read_where_nothing_else_imports_ml_dtypes(tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file({"w": np.array([1.5, -3], ml_dtypes.bfloat16)}, tmp_path / "x")
    done = run_python(
        f"from manyhead._weights import SafeTensors; w = SafeTensors({str(tmp_path / 'x')!r})['w']; print(w.dtype, w)"
    )
    assert done.stdout == "bfloat16 [1.5 -3]\n", done.stderr


def test_safetensors_are_read_one_by_one(tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    arrays = {"a": tokens(3, 4), "b": tokens(2, dtype=F64), "empty": np.zeros((0, 3), np.float16)}
    save_file(arrays | {"ids": np.arange(3)}, tmp_path / "x")
    read = SafeTensors(tmp_path / "x")
    assert read.keys() == {*arrays, "ids"} and len(read) == 4
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)
    assert read.get("no") is None
    with pytest.raises(TypeError, match="ids in .*x has type I64, must be one of F64, F32, F16, BF16"):
        read["ids"]


@pytest.mark.parametrize("data", [b"", struct.pack("<Q", 100) + b"{}", struct.pack("<Q", 2) + b"{]"])
def test_files_that_are_not_safetensors(tmp_path, data):
    pytest.importorskip("safetensors")
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="x cannot be read: "):
        manyhead.MultiHeadAttention.from_safetensors(path, "", 1)


def test_paths_that_are_no_files(tmp_path):
    pytest.importorskip("safetensors")
    for path, exception in ((tmp_path, OSError), (tmp_path / "none", FileNotFoundError)):
        with pytest.raises(exception, match=str(path)):
            manyhead.MultiHeadAttention.from_safetensors(path, "", 1)


@pytest.mark.parametrize("package", ["safetensors", "ml_dtypes"])
def test_packages_that_safetensors_need_are_named(tmp_path, monkeypatch, package):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file({"w": np.zeros(1, ml_dtypes.bfloat16)}, tmp_path / "x")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs the Python package {package}: .*'manyhead\[safetensors\]'"):
        SafeTensors(tmp_path / "x")["w"]


# ---- torch's conventions ----


def torch_reference(given, query, key, value, allowed=None, bias=None):
    x = [a.swapaxes(0, 1) for a in (query, key, value)]
    out, weights_ = reference.multi_head_attention(*x, **given, attn_mask=allowed, attn_bias=bias)
    return out.swapaxes(0, 1), weights_


def test_forward_torch_has_the_opposite_polarity():
    given = weights()
    layer = manyhead.MultiHeadAttention(**given)
    rng = np.random.default_rng(0)
    query, key = tokens(5, 2, 12), tokens(7, 2, 12, seed=2)
    forbidden, ignored = rng.random((5, 7)) < 0.3, rng.random((2, 7)) < 0.3
    expected = torch_reference(given, query, key, key, ~forbidden & ~ignored[:, None, None, :])
    out, mean = layer.forward_torch(query, key, key, key_padding_mask=ignored, attn_mask=forbidden)
    close(out, expected[0])
    close(mean, expected[1].mean(axis=1))
    _, per_head = layer.forward_torch(query, key, key, ignored, True, forbidden, False)
    close(per_head, expected[1])
    out, none = layer.forward_torch(query, key, key, ignored, need_weights=False, attn_mask=forbidden)
    close(out, expected[0])
    assert none is None
    first = [x.swapaxes(0, 1) for x in (query, key, key)]
    out, _ = layer.forward_torch(*first, ignored, attn_mask=forbidden, batch_first=True)
    close(out, expected[0].swapaxes(0, 1))
    out, mean = layer.forward_torch(query[:, 0], key[:, 0], key[:, 0], ignored[0], attn_mask=forbidden)
    close(out, expected[0][:, 0])
    close(mean, expected[1][0].mean(axis=0))


def test_forward_torch_with_additive_and_three_dimensional_masks():
    given = weights()
    layer = manyhead.MultiHeadAttention(**given)
    rng = np.random.default_rng(0)
    x = tokens(5, 2, 12)
    added, padding = (
        rng.standard_normal((6, 5, 5)).astype(F32),
        np.where(rng.random((2, 5)) < 0.3, -np.inf, 0).astype(F32),
    )
    expected = torch_reference(given, x, x, x, bias=added.reshape(2, 3, 5, 5) + padding[:, None, None, :])
    close(layer.forward_torch(x, x, x, padding, attn_mask=added)[0], expected[0])
    expected = torch_reference(given, x, x, x, np.tril(np.ones((5, 5), bool)))
    close(layer.forward_torch(x, x, x, is_causal=True)[0], expected[0])
    forbidden = np.triu(np.ones((5, 5), bool), 1)
    close(layer.forward_torch(x, x, x, attn_mask=forbidden, is_causal=True)[0], expected[0])


def test_against_torch_itself():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(12, 3, kdim=7, vdim=9, add_bias_kv=True, add_zero_attn=True).eval()
    torch.nn.init.normal_(module.in_proj_bias)
    layer = manyhead.MultiHeadAttention.from_state_dict(module.state_dict(), num_heads=3, add_zero_attn=True)
    query, key, value = torch.randn(5, 2, 12), torch.randn(6, 2, 7), torch.randn(6, 2, 9)
    masks = {"key_padding_mask": torch.tensor([[False] * 5 + [True], [False] * 6]), "attn_mask": torch.rand(5, 6) < 0.3}
    for options in ({}, masks, {"average_attn_weights": False}, {"attn_mask": torch.randn(6, 5, 6)}):
        with torch.no_grad():
            expected = module(query, key, value, **options)
        result = layer.forward_torch(query, key, value, **options)
        for a, b in zip(result, expected, strict=True):
            assert isinstance(a, torch.Tensor)
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_against_torch_in_16_bits(name):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval().to(getattr(torch, name))
    x = torch.randn(2, 50, 64, dtype=getattr(torch, name))
    mask = torch.randn(50, 50, dtype=x.dtype)
    for layer in (
        manyhead.MultiHeadAttention.from_state_dict(module.state_dict(), num_heads=4),
        manyhead.MultiHeadAttention.from_state_dict(module.float().state_dict(), num_heads=4, dtype=x.dtype),
    ):
        assert name in repr(layer)
        with torch.no_grad():
            expected = module.float()(x.float(), x.float(), x.float(), attn_mask=mask.float())
        out, weights = layer.forward_torch(x, x, x, attn_mask=mask, batch_first=True)
        assert out.dtype == x.dtype and weights.dtype == torch.float32
        torch.testing.assert_close(out.float(), expected[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(weights, expected[1], rtol=2e-2, atol=2e-2)
        written = torch.empty_like(x)
        assert layer(x, attn_bias=mask, out=written) is written
        torch.testing.assert_close(written.float(), expected[0], rtol=2e-2, atol=2e-2)


# ---- errors ----

GOOD = weights()
X = tokens(2, 3, 12)


@pytest.mark.parametrize(("change", "exception", "text"), [
    ({"w_q": None}, TypeError, "w_q is missing"),
    ({"num_heads": 5, "num_kv_heads": 5}, ValueError, "w_q has 12 outputs, which 5 heads cannot share"),
    ({"num_heads": 3, "num_kv_heads": 2}, ValueError, "num_kv_heads is 2, must be at least 1 and divide num_heads = 3"),
    ({"num_heads": 0, "num_kv_heads": None}, ValueError, "num_heads is 0, must be at least 1"),
    ({"num_heads": 3.0}, TypeError, "num_heads must be an integer"),
    ({"num_heads": 2**64, "num_kv_heads": None}, ValueError, "num_heads is 18446744073709551616"),
    ({"w_k": tokens(15, 12)}, ValueError, "w_k has head_dim 5, must be that of w_q: 4"),
    ({"w_q": tokens(12)}, ValueError, r"w_q has shape \(12,\), which is not 'out_in'"),
    ({"weight_layout": "per_head"}, ValueError, "w_q has shape .* which is not 'per_head'"),
    ({"weight_layout": "rows"}, ValueError, "weight_layout is 'rows'"),
    ({"w_o": tokens(12, 11)}, ValueError, r"w_o has shape \(12, 11\), must join 3 heads of 4 values"),
    ({"w_o": None}, ValueError, "b_o is given without w_o"),
    ({"b_q": tokens(11)}, ValueError, "b_q has 11 elements, must have 12"),
    ({"bias_k": tokens(12)}, ValueError, "bias_k and bias_v go together"),
    ({"bias_k": tokens(12), "bias_v": tokens(11)}, ValueError, "bias_v has 11 elements"),
    ({"in_proj": tokens(36, 12)}, ValueError, "in_proj takes the place of"),
    ({"in_proj_bias": tokens(36)}, ValueError, "in_proj_bias takes the place of"),
    ({"w_q": GOOD["w_q"].astype(int)}, TypeError, "w_q has dtype int64"),
    ({"dtype": np.int16}, TypeError, "dtype is .*int16.*, must be float32, float64, float16 or bfloat16"),
    ({"dtype": "real"}, TypeError, "dtype is 'real', must be"),
    ({"scale": "x"}, TypeError, "scale must be a real number"),
    ({"scale": np.nan}, ValueError, "scale"),
    ({"add_zero_attn": "x"}, TypeError, "add_zero_attn must be True or False"),
    ({"w_q": tokens(12, 0), "w_k": tokens(12, 0), "w_v": tokens(12, 0)}, ValueError, "embed_dim is 0"),
])  # fmt: skip
def test_bad_weights(change, exception, text):
    with pytest.raises(exception, match=text):
        manyhead.MultiHeadAttention(**(GOOD | change))


def test_bad_in_proj():
    with pytest.raises(
        ValueError, match=r"in_proj has shape \(35, 12\); its rows must be shared evenly by 3 \+ 2 \* 3"
    ):
        manyhead.MultiHeadAttention(in_proj=tokens(35, 12), num_heads=3)


@pytest.mark.parametrize(("arguments", "options", "exception", "text"), [
    ((X[0],), {}, ValueError, r"x_q has shape \(3, 12\), must be \(batch, len, 12\)"),
    ((X[..., :11],), {}, ValueError, "x_q has shape"),
    ((X, X[..., :11]), {}, ValueError, "x_k has shape"),
    ((X, X, X[:, :2]), {}, ValueError, "x_v has shape"),
    ((X, X[:1]), {}, ValueError, "x_k has shape"),
    ((X.astype(F64),), {}, TypeError, "x_q has dtype float64, must be that of the layer: float32"),
    ((X.astype(ml_dtypes.bfloat16),), {}, TypeError, "x_q has dtype bfloat16, must be that of the layer: float32"),
    (("x",), {}, TypeError, "x_q must be an array"),
    ((X, X[:, :2]), {"causal": True}, ValueError, "top_left|TOP_LEFT"),
    ((X,), {"attn_mask": np.ones((4, 3), bool)}, ValueError, "attn_mask has shape"),
    ((X,), {"key_mask": np.ones((2, 4), bool)}, ValueError, "key_mask has shape"),
    ((X,), {"seqused_k": [1, 4]}, ValueError, "seqused_k"),
    ((X,), {"softcap": -1}, ValueError, "softcap"),
    ((X,), {"need_weights": "yes"}, TypeError, "need_weights must be True or False"),
    ((X,), {"average_weights": "yes"}, TypeError, "average_weights must be True or False"),
    ((X,), {"window": (1.0, 0)}, TypeError, "window_left must be an integer"),
    ((X,), {"out": np.zeros((2, 3, 11), F32)}, ValueError, r"out has shape \(2, 3, 11\), must be \(2, 3, 12\)"),
    ((X,), {"out": np.zeros((2, 3, 12))}, TypeError, "out has dtype float64"),
    ((X,), {"out": X}, ValueError, "out"),
    ((X,), {"threads": -1}, ValueError, "threads is -1"),
    ((X,), {"sinks": 1}, TypeError, "sinks"),
])  # fmt: skip
def test_bad_calls(arguments, options, exception, text):
    layer = manyhead.MultiHeadAttention(**GOOD)
    before = X.copy()
    with pytest.raises(exception, match=text):
        layer(*arguments, **options)
    np.testing.assert_array_equal(X, before)


@pytest.mark.parametrize(("arguments", "options", "text"), [
    ((X, X[0], X), {}, "must all have 3 dimensions"),
    ((X, X, X), {"attn_mask": np.ones((3, 3), bool)}, "attn_mask has shape"),
    ((X, X, X), {"attn_mask": np.ones((6, 2, 2), bool)}, "attn_mask has shape"),
    ((X, X, X), {"key_padding_mask": np.ones((2, 2), bool)}, "key_padding_mask has shape"),
])  # fmt: skip
def test_bad_calls_of_forward_torch(arguments, options, text):
    with pytest.raises(ValueError, match=text):
        manyhead.MultiHeadAttention(**GOOD).forward_torch(*arguments, **options)
