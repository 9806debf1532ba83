"""The functions that the stored cases call, on manyhead's public interface.

A case that needs what this release does not have raises NotInThisRelease, with the reason; nothing else may be skipped.
"""

from __future__ import annotations

from typing import Any

import manyhead


class NotInThisRelease(Exception):
    """The feature is not part of this release; the text names it."""


# fmt: off
def attention(q: Any, k: Any, v: Any, *, align: str = "top_left", bool_mask: Any = None, additive_mask: Any = None,
              kv_lens: Any = None, k_scale: Any = None, v_scale: Any = None, **options: Any) -> dict[str, Any]:
    # fmt: on
    if k_scale is not None or v_scale is not None:
        raise NotInThisRelease("quantised keys and values (k_scale, v_scale)")
    if options.get("q_offset") is None:
        options["align"] = align
    result = manyhead.attention(q, k, v, attn_mask=bool_mask, attn_bias=additive_mask, seqused_k=kv_lens, **options)
    return result._asdict() if isinstance(result, tuple) else {"out": result}


def merge_states(outs: Any, lses: Any) -> dict[str, Any]:
    return manyhead.merge_states(outs, lses)._asdict()


def multi_head_attention(x_q: Any, x_k: Any, x_v: Any, *, w_q: Any, w_k: Any, w_v: Any, w_o: Any, b_q: Any = None,
                         b_k: Any = None, b_v: Any = None, b_o: Any = None, num_heads: int,
                         num_kv_heads: int | None = None, bool_mask: Any = None, additive_mask: Any = None,
                         key_valid: Any = None, causal: bool = False, bias_k: Any = None, bias_v: Any = None,
                         add_zero_attn: bool = False, need_weights: bool = False,
                         average_weights: bool = False) -> dict[str, Any]:  # fmt: skip
    layer = manyhead.MultiHeadAttention(
        w_q, w_k, w_v, w_o, b_q=b_q, b_k=b_k, b_v=b_v, b_o=b_o, num_heads=num_heads, num_kv_heads=num_kv_heads,
        bias_k=bias_k, bias_v=bias_v, add_zero_attn=add_zero_attn,
    )  # fmt: skip
    result = layer(
        x_q, x_k, x_v, attn_mask=bool_mask, attn_bias=additive_mask, key_mask=key_valid, causal=causal,
        align="top_left", need_weights=need_weights, average_weights=average_weights,
    )  # fmt: skip
    return result._asdict() if need_weights else {"out": result}


def _absent(feature: str) -> Any:
    def function(*_: Any, **__: Any) -> Any:
        raise NotInThisRelease(feature)

    return function


FUNCTIONS = {
    "attention": attention,
    "merge_states": merge_states,
    "multi_head_attention": multi_head_attention,
    "attention_varlen": _absent("ragged batches"),
    "attention_paged": _absent("paged keys and values"),
    "paged_append": _absent("paged keys and values"),
    "cache_update": _absent("cache updates"),
    "rope": _absent("rotary embedding"),
    "attention_backward": _absent("gradients"),
    "multi_head_attention_backward": _absent("gradients"),
}
