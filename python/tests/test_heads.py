"""manyhead.show_heads: what is in the figure, and what it refuses."""

from __future__ import annotations

import builtins
import io

import manyhead
import numpy as np
import pytest

pytest.importorskip("matplotlib")


def weights(*shape, seed=0):
    exp = np.exp(np.random.default_rng(seed).standard_normal(shape))
    return exp / exp.sum(axis=-1, keepdims=True)


def labels(axis):
    return [text.get_text() for text in axis.get_ticklabels()]


def maps(figure):
    return [ax for ax in figure.axes if ax.images and ax.get_title()]


def png(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def test_one_heat_map_per_head_with_its_weights_labels_and_title():
    given = weights(5, 3, 3).astype(np.float32)
    figure = manyhead.show_heads(given, ["the", "cat", "sat"], layer=2, title="The cat sat.")
    drawn = maps(figure)
    assert [ax.get_title() for ax in drawn] == [f"head {head}" for head in range(5)]
    for head, ax in enumerate(drawn):
        np.testing.assert_array_equal(ax.images[0].get_array(), given[head])
        assert labels(ax.xaxis) == labels(ax.yaxis) == ["the", "cat", "sat"]
    assert figure.get_suptitle() == "layer 2: The cat sat."
    assert len(figure.axes) == 6, "five heads and one colour bar"
    assert png(figure).startswith(b"\x89PNG")


def test_scale_is_shared_or_one_for_each_head():
    given = np.stack([weights(4, 4), 0.5 * weights(4, 4, seed=1), np.zeros((4, 4))])
    shared = maps(manyhead.show_heads(given, list("abcd")))
    assert {ax.images[0].get_clim() for ax in shared} == {(0.0, given.max())}
    own = manyhead.show_heads(given, list("abcd"), shared_scale=False)
    assert [ax.images[0].get_clim()[1] for ax in maps(own)[:2]] == [given[0].max(), given[1].max()]
    assert len(own.axes) == 6, "a colour bar for each head"


def test_cross_attention_has_labels_of_its_own_for_the_keys():
    (ax,) = maps(manyhead.show_heads(weights(1, 2, 3), ["q0", "q1"], key_tokens=["k0", "k1", "k2"]))
    assert labels(ax.yaxis) == ["q0", "q1"]
    assert labels(ax.xaxis) == ["k0", "k1", "k2"]


def test_batch_chooses_the_entry():
    given = weights(2, 3, 4, 4)
    drawn = maps(manyhead.show_heads(given, list("abcd"), batch=1))
    np.testing.assert_array_equal(drawn[2].images[0].get_array(), given[1, 2])


def test_long_texts_are_cut_and_the_figure_says_so():
    figure = manyhead.show_heads(weights(2, 30, 50), [f"q{i}" for i in range(30)], key_tokens=["k"] * 50, max_tokens=35)
    assert maps(figure)[0].images[0].get_array().shape == (30, 35)
    assert figure.get_supxlabel() == "Drawn: the first 35 of 50 keys."
    figure = manyhead.show_heads(weights(2, 30, 30), ["t"] * 30, max_tokens=7)
    assert figure.get_supxlabel() == "Drawn: the first 7 of 30 queries and the first 7 of 30 keys."
    assert manyhead.show_heads(weights(2, 7, 7), ["t"] * 7, max_tokens=7).get_supxlabel() == ""


def test_labels_stay_readable():
    long, markup, blank = "internationalization", "$x_1$ $", "a\nb"
    figure = manyhead.show_heads(weights(1, 3, 3), [long, markup, blank], titles=["costs $5 or $6"], title="$$")
    (ax,) = maps(figure)
    assert labels(ax.xaxis) == ["internationaliz\u2026", "$x_1$ $", "a b"]
    assert ax.get_title() == "costs $5 or $6"
    png(figure)  # as math markup, these labels would end the drawing with an error


def test_neighbouring_labels_do_not_overlap():
    figure = manyhead.show_heads(weights(12, 40, 40), [f"token{i}" for i in range(40)])
    figure.draw_without_rendering()
    for ax in maps(figure):
        boxes = [text.get_window_extent() for text in ax.get_xticklabels()]
        assert all(a.x1 <= b.x0 for a, b in zip(boxes, boxes[1:], strict=False))
        boxes = [text.get_window_extent() for text in ax.get_yticklabels()]
        assert all(a.y0 >= b.y1 for a, b in zip(boxes, boxes[1:], strict=False))


def test_titles_do_not_overlap_their_neighbours_and_stay_inside():
    titles = [f"head {head}: the token itself 100%\n'international' -> 'revolutionary' 67%" for head in range(12)]
    figure = manyhead.show_heads(weights(12, 6, 6), list("abcdef"), titles=titles, title="word " * 100)
    figure.draw_without_rendering()
    boxes = [ax.title.get_window_extent() for ax in maps(figure)]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    everything = [*boxes, *(text.get_window_extent() for ax in maps(figure) for text in ax.get_xticklabels())]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in everything)
    assert figure.get_suptitle().count("\n") == 1


def test_nan_is_left_out_of_the_scale():
    given = weights(1, 2, 2)
    given[0, 1, 1] = np.nan
    (ax,) = maps(manyhead.show_heads(given, ["a", "b"]))
    assert ax.images[0].get_clim() == (0.0, np.nanmax(given))
    png(manyhead.show_heads(np.full((1, 2, 2), np.nan), ["a", "b"]))


def test_pyplot_is_not_touched():
    import sys

    manyhead.show_heads(weights(1, 2, 2), ["a", "b"])
    if "matplotlib.pyplot" in sys.modules:
        assert sys.modules["matplotlib.pyplot"].get_fignums() == []


def test_weights_of_a_call():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 4, 8)).astype(np.float32) for _ in range(3))
    result = manyhead.attention(q, k, v, return_weights=True)
    drawn = maps(manyhead.show_heads(result.weights, list("abcd")))
    np.testing.assert_array_equal(drawn[1].images[0].get_array(), result.weights[0, 1])


@pytest.mark.parametrize(
    ("shape", "tokens", "options", "text"),
    [
        ((2, 3), "abc", {}, r"weights has shape \(2, 3\), must be \[heads, q_len, kv_len\]"),
        ((0, 3, 3), "abc", {}, r"nothing to draw: heads, q_len, kv_len are \(0, 3, 3\)"),
        ((2, 3, 3), "ab", {}, "tokens has 2 entries, must have q_len of weights = 3"),
        ((2, 3, 4), "abc", {}, "key_tokens is missing: weights has q_len = 3 and kv_len = 4"),
        ((2, 3, 4), "abc", {"key_tokens": list("abc")}, "key_tokens has 3 entries, must have kv_len of weights = 4"),
        ((2, 3, 3), "abc", {"titles": ["one"]}, "titles has 1 entries, must have one per head: 2"),
        ((2, 3, 3), "abc", {"batch": 1}, r"batch is 1, but weights has no batch dimension: its shape is \(2, 3, 3\)"),
        ((2, 1, 3, 3), "abc", {"batch": 2}, r"batch is 2, must be 0\.\.1"),
        ((2, 1, 3, 3), "abc", {"batch": -1}, r"batch is -1, must be 0\.\.1"),
        ((2, 3, 3), "abc", {"max_tokens": 0}, "max_tokens is 0, must be at least 1"),
        ((2, 3, 3), "abc", {"columns": 0}, "columns is 0, must be at least 1"),
        (
            (2, 3, 3),
            "abc",
            {"cmap": "no such map"},
            "cmap is 'no such map', must be the name of a matplotlib colour map",
        ),
    ],
)
def test_errors_name_the_argument(shape, tokens, options, text):
    with pytest.raises(ValueError, match=text):
        manyhead.show_heads(np.ones(shape), list(tokens), **options)


def test_one_string_is_not_a_list_of_tokens():
    with pytest.raises(ValueError, match="tokens is one string, must be a sequence of 3 labels"):
        manyhead.show_heads(np.ones((1, 3, 3)), "abc")


def test_types_of_the_weights():
    for dtype in ("float16", "float32", "int64", "bool"):
        (ax,) = maps(manyhead.show_heads(np.eye(2)[None].astype(dtype), ["a", "b"]))
        np.testing.assert_array_equal(ax.images[0].get_array(), np.eye(2))
    for dtype in ("complex128", "U1", "datetime64[s]", "V4"):
        with pytest.raises(TypeError, match=r"weights holds .*, must hold real numbers"):
            manyhead.show_heads(np.zeros((1, 2, 2), dtype), ["a", "b"])


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    (ax,) = maps(manyhead.show_heads(np.eye(2)[None].astype(ml_dtypes.bfloat16), ["a", "b"]))
    np.testing.assert_array_equal(ax.images[0].get_array(), np.eye(2))


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="show_heads needs matplotlib: `pip install matplotlib`"):
        manyhead.show_heads(np.ones((1, 2, 2)), ["a", "b"])
