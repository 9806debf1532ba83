"""The layers of the sentence encoder MiniLM on a text, and what its embedding loses without a head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .._attention import attention
from .._user import UserError
from .recording import Layer, Recording, pick_layers

if TYPE_CHECKING:
    from .encoder import Encoder, Tokens

TEXT = "The animal didn't cross the street because it was too tired."


def record_demo(
    text: str,
    *,
    layers: Sequence[int] | None = None,
    model: Path | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Recording:
    """Encodes the text once as it is and once without each head; `model` is a folder with another BERT encoder."""
    from .encoder import Encoder, ModelError, find_model

    try:
        encoder = Encoder(model or find_model())
    except ImportError as error:
        raise UserError(f"--demo needs the Python package {error.name}: pip install 'manyhead[demo]'") from error
    except ModelError as error:
        raise UserError(str(error)) from error
    (tokens,) = encoder.tokenize([text])
    chosen = pick_layers(encoder.layers, layers)
    recorded: dict[int, Layer] = {}

    def record(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        if layer in chosen:
            w_o = encoder.weights[f"encoder.layer.{layer}.attention.output.dense.weight"]
            recorded[layer] = Layer(q[0].transpose(1, 0, 2), k[0].transpose(1, 0, 2), v[0].transpose(1, 0, 2), w_o)
        return attention(q, k, v, layout="bshd")

    whole = encoder.encode([tokens], record)[0].astype(np.float64)
    changes = {layer: np.zeros(encoder.heads) for layer in chosen}
    for number, layer in enumerate(chosen):
        for head in range(encoder.heads):
            changes[layer][head] = max(0.0, 1 - float(whole @ _without(encoder, tokens, layer, head)))
            progress((number + (head + 1) / encoder.heads) / len(chosen))
    cut = f" (the first {len(tokens)} tokens)" if tokens.cut else ""
    name = model.name if model else "MiniLM"
    return Recording(f"{name}: {text}{cut}", recorded, tokens.pieces, embedding_change=changes)


def _without(encoder: Encoder, tokens: Tokens, removed_layer: int, head: int) -> np.ndarray:
    """The embedding with the output of one head set to zero."""

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        out = attention(q, k, v, layout="bshd")
        if layer == removed_layer:
            out[:, :, head] = 0
        return out

    return encoder.encode([tokens], attend)[0].astype(np.float64)
