"""Attention and the layer in plain NumPy and float64, with the names of manyhead: what results are compared with."""

from types import SimpleNamespace

import numpy as np


def attention(q, k, v, *, scale=None, causal=False, align="top_left", q_offset=None, window=None, softcap=0.0,
              attn_mask=None, attn_bias=None, key_mask=None, seqused_k=None, alibi_slopes=None, alibi_mode="abs",
              sinks=None):  # fmt: skip
    """out, lse, weights, column_sums and the scores at each stage (raw, capped, biased) of (batch, heads, len, dim)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, heads, q_len, head_dim = q.shape
    k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    kv_len = k.shape[2]
    shape = (batch, heads, q_len, kv_len)

    used = np.full(batch, kv_len) if seqused_k is None else np.asarray(seqused_k)
    if q_offset is None:
        q_offset = used - q_len if align == "bottom_right" else 0
    offset = np.broadcast_to(q_offset, batch)[:, None, None, None]
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    p = i + offset

    with np.errstate(invalid="ignore", over="ignore"):  # NaN and inf in slots that nobody attends
        raw = (1 / np.sqrt(head_dim) if scale is None else scale) * np.einsum("bhid,bhjd->bhij", q, k)
        capped = softcap * np.tanh(raw / softcap) if softcap else raw
        biased = capped
        if alibi_slopes is not None:
            slopes = np.asarray(alibi_slopes, np.float64)
            slopes = np.broadcast_to(slopes, (batch, heads))[:, :, None, None]
            biased = biased + (slopes * (j - p) if alibi_mode == "signed" else -slopes * abs(p - j))
        attend = j < used[:, None, None, None]
        if causal:
            attend = attend & (j <= p)
        left, right = (-1, -1) if window is None else window
        attend = attend & ((left < 0) | (j >= p - left)) & ((right < 0) | (j <= p + right))
        if attn_mask is not None:
            attend = attend & (np.asarray(attn_mask) != 0)
        if key_mask is not None:
            attend = attend & np.broadcast_to(np.asarray(key_mask) != 0, (batch, kv_len))[:, None, None, :]
        if attn_bias is not None:
            attn_bias = np.asarray(attn_bias, np.float64)
            attend = attend & (attn_bias != -np.inf)
            biased = biased + attn_bias
        attend = np.broadcast_to(attend, shape)
        biased = np.where(attend, biased, -np.inf)

        sink = -np.inf if sinks is None else np.asarray(sinks, np.float64)[None, :, None, None]
        top = np.maximum(biased.max(axis=-1, keepdims=True, initial=-np.inf), sink)
        top = np.where(top == -np.inf, 0, top)
        e = np.where(attend, np.exp(biased - top), 0)
        total = e.sum(axis=-1, keepdims=True) + np.exp(sink - top)
        weights = np.where(attend, e / np.where(total == 0, 1, total), 0)
        out = np.where(attend[..., None], weights[..., None] * v[:, :, None], 0).sum(axis=3)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    return SimpleNamespace(out=out, lse=lse, weights=weights, column_sums=weights.sum(axis=2),
                           raw=raw, capped=capped, biased=biased)  # fmt: skip


def merge(outs, lses):
    """(out, lse) of partial results; states with lse -inf count nothing."""
    outs, lses = np.asarray(outs, np.float64), np.asarray(lses, np.float64)
    top = lses.max(axis=0, initial=-np.inf)
    top = np.where(top == -np.inf, 0, top)
    parts = np.exp(lses - top)
    total = parts.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where((parts > 0)[..., None], outs * (parts / np.where(total == 0, 1, total))[..., None], 0).sum(
            axis=0
        )
        return out, np.log(total) + top


def multi_head_attention(x_q, x_k, x_v, *, w_q, w_k, w_v, w_o, num_heads, num_kv_heads=None, b_q=None, b_k=None,
                         b_v=None, b_o=None, bias_k=None, bias_v=None, add_zero_attn=False, attn_mask=None,
                         attn_bias=None, **options):  # fmt: skip
    """(out, weights) of the layer; matrices are (out, in). Extra keys stand last and are attended by every row."""

    def project(x, w, b, heads):
        y = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T + (0 if b is None else b)
        return y.reshape(*y.shape[:2], heads, -1).swapaxes(1, 2)

    kv_heads = num_kv_heads or num_heads
    q, k, v = project(x_q, w_q, b_q, num_heads), project(x_k, w_k, b_k, kv_heads), project(x_v, w_v, b_v, kv_heads)
    masked = attention(q, k, v, attn_mask=attn_mask, attn_bias=attn_bias, **options).biased
    for extra_k, extra_v in [(bias_k, bias_v)] * (bias_k is not None) + [(0.0, 0.0)] * add_zero_attn:
        row = (np.reshape(np.broadcast_to(e, kv_heads * x.shape[3]), (1, kv_heads, 1, -1)) for e, x in
               ((extra_k, k), (extra_v, v)))  # fmt: skip
        k, v = (np.concatenate([x, np.repeat(e, len(x), 0)], 2) for x, e in zip((k, v), row, strict=True))
    extra = k.shape[2] - masked.shape[3]
    attend = np.pad(masked != -np.inf, [(0, 0)] * 3 + [(0, extra)], constant_values=True)
    bias = None if attn_bias is None else np.pad(np.broadcast_to(attn_bias, masked.shape), [(0, 0)] * 3 + [(0, extra)])
    kept = {name: options[name] for name in ("scale", "softcap") if name in options}
    result = attention(q, k, v, attn_mask=attend, attn_bias=bias, **kept)
    out = result.out.swapaxes(1, 2).reshape(len(q), q.shape[2], -1)
    out = out if w_o is None else out @ np.asarray(w_o, np.float64).T + (0 if b_o is None else b_o)
    return out, result.weights
