"""One HTML page with everything in it: no scripts, no other files."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from .._library import __version__
from .._user import need
from ..report.units import plural
from .pictures import Picture
from .report import Report, head_rows, notable

_COLUMNS = [
    ("entropy", "entropy, nats", "{:.2f}"),
    ("entropy_share", "share", "{:.0%}"),
    ("distance", "distance", "{:.1f}"),
    ("reach", "reach", "{}"),
    ("self", "itself", "{:.0%}"),
    ("previous", "previous", "{:.0%}"),
    ("next", "next", "{:.0%}"),
    ("first_key", "first key", "{:.0%}"),
    ("top_key", "top key", "{:.0%}"),
    ("output_change", "output change", "{:.0%}"),
]
_EMBEDDING = ("embedding_change", "embedding change", "{:.4f}")

_MEANINGS = [
    (
        "habit",
        "The relative position or the key with the largest share of the head's weight; even where the entropy is at "
        "least 95 % of the largest; where no share reaches 25 %, how far to either side 90 % of the weight goes.",
    ),
    (
        "entropy and its share",
        "Mean over the queries of - sum p log p, and the same as a share of the logarithm of how many keys the query "
        "may attend: 0 % looks at one key, 100 % at all alike.",
    ),
    ("distance, reach", "Mean of |i - j| by weight, and how many tokens to either side hold 90 % of the weight."),
    (
        "itself, previous, next, first key, top key",
        "Shares of the head's weight: of the token itself, its neighbours, the first key and the key that attracts "
        "most. A large share on one key whatever the query is called a sink.",
    ),
    ("closest head", "The head of the same layer whose matrix of weights has the largest cosine with this head's."),
]
_OUTPUT = (
    "The norm of what the head adds to the layer's output{}, as a share of the norm of that output: how much the "
    "output changes when the head is set to zero."
)


def make_page(report: Report, pictures: Sequence[Picture]) -> str:
    jinja2 = need("jinja2", "the page")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    heads, q_len, kv_len = report.recording.sizes
    queries = "1 query" if q_len == 1 else f"{q_len:,} queries"
    lengths = plural(kv_len, "token") if q_len == kv_len else f"{queries}, {plural(kv_len, 'key')}"
    layers = plural(len(report.layers), "layer")
    meanings = [*_MEANINGS, ("output change", _OUTPUT.format(" behind its projection" if report.projected else ""))]
    columns = list(_COLUMNS)
    if report.recording.embedding_change:
        columns.append(_EMBEDDING)
        meanings.append(
            ("embedding change", "Cosine distance between the model's embedding of the text with and without the head.")
        )
    return environment.get_template("page.html").render(
        report=report,
        pictures=pictures,
        rows=head_rows(report),
        notable=notable(report),
        columns=columns,
        meanings=meanings,
        sizes=f"{layers} of {plural(heads, 'head')}, {lengths}{', causal' * report.recording.causal}.",
        version=__version__,
        base64=lambda png: base64.b64encode(png).decode("ascii"),
    )
