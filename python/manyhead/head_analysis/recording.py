"""The tensors of attention layers, saved in .npz files, and what is known about them."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._user import UserError, read_text

FORMAT = """\
An .npz file holds (numpy.savez("qkv.npz", q=q, k=k, v=v)):
  q         [heads, q_len, head_dim], or with the batch in front [batch, heads,
            q_len, head_dim], or with the layers in front of that [layers,
            batch, heads, q_len, head_dim]; float32, float64 or float16
  k, v      the same with kv_heads, kv_len (and v_dim); kv_heads divides heads
  w_o       optional: the output projection [hidden, heads * v_dim], as
            torch.nn.Linear.weight; with layers [layers, hidden, heads * v_dim]
  tokens    optional: kv_len strings, or [batch, kv_len]
  lengths   optional: [batch] integers, the tokens in use of a padded batch
  causal    optional: true where token i may attend tokens 0..i only
  scale     optional: factor of the scores, instead of 1 / sqrt(head_dim)
With fewer queries than keys the queries are the last tokens. Several files are
taken as layers, one after the other. One text of a batch is looked at: --batch.
"""

_KNOWN = ("q", "k", "v", "w_o", "tokens", "lengths", "causal", "scale")
_FLOATS = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16))
_DIMENSIONS = {
    3: "[heads, len, dim]",
    4: "[batch, heads, len, dim]",
    5: "[layers, batch, heads, len, dim]",
}


class Layer(NamedTuple):
    """q [heads, q_len, head_dim], k [kv_heads, kv_len, head_dim], v [kv_heads, kv_len, v_dim] of one text."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    w_o: np.ndarray | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """heads, q_len, kv_len."""
        return self.q.shape[0], self.q.shape[1], self.k.shape[1]


@dataclass(frozen=True)
class Recording:
    """Layers over the same tokens."""

    title: str
    layers: dict[int, Layer]
    tokens: list[str] | None = None  # of the keys
    causal: bool = False
    scale: float | None = None
    # What removing a head does to the model's result, [heads] for each layer; where there is a model to ask.
    embedding_change: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return next(iter(self.layers.values())).sizes


def pick_layers(layers: int, wanted: Sequence[int] | None) -> list[int]:
    if wanted is None:
        return list(range(layers))
    if max(wanted) >= layers:
        raise UserError(f"--layers asks for layer {max(wanted)}; there are layers 0 to {layers - 1}")
    return sorted(set(wanted))


def read_recording(
    files: Sequence[Path],
    *,
    batch: int = 0,
    layers: Sequence[int] | None = None,
    causal: bool | None = None,
    tokens: Path | None = None,
) -> Recording:
    """Files as FORMAT describes them; `causal` and `tokens` come before what the files say."""
    parts = [_read_file(file, batch) for file in files]
    found = [layer for part in parts for layer in part.layers.values()]
    for file, part in zip(files, parts, strict=True):
        if part.sizes != parts[0].sizes:
            raise UserError(
                f"{file} has heads, q_len, kv_len = {part.sizes} and {files[0]} has {parts[0].sizes}: layers of one "
                "report must have the same"
            )
        if causal is None and part.causal != parts[0].causal:
            raise UserError(f"{file} and {files[0]} differ in causal: say --causal or --no-causal")
        if part.scale != parts[0].scale:
            raise UserError(f"{file} has scale {part.scale} and {files[0]} has {parts[0].scale}")
    chosen = {number: found[number] for number in pick_layers(len(found), layers)}
    for number, layer in chosen.items():
        for name, array in layer._asdict().items():
            if array is not None and not np.isfinite(array).all():
                raise UserError(f"{name} of layer {number} holds NaN or infinity")
    names = next((part.tokens for part in parts if part.tokens), None)
    if tokens is not None:
        names = read_tokens(tokens)
        if len(names) != parts[0].sizes[2]:
            raise UserError(f"{tokens} has {len(names)} tokens, k has {parts[0].sizes[2]} keys")
    return replace(
        parts[0],
        title=", ".join(file.name for file in files),
        layers=chosen,
        tokens=names,
        causal=parts[0].causal if causal is None else causal,
    )


def read_tokens(file: Path) -> list[str]:
    """A JSON list of strings, or one token a line."""
    text = read_text(file)
    if file.suffix == ".json":
        try:
            tokens = json.loads(text)
        except ValueError as error:
            raise UserError(f"{file} is not JSON: {error}") from error
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise UserError(f"{file} must be a list of strings")
        return tokens
    return text.removesuffix("\n").split("\n")


def _read_file(file: Path, batch: int) -> Recording:
    arrays = _load(file)
    q, k, v = (_floats(file, name, arrays) for name in ("q", "k", "v"))
    tensors = {"q": q, "k": k, "v": v}
    for name, array in tensors.items():
        if array.ndim not in _DIMENSIONS or array.ndim != q.ndim:
            forms = ", ".join(_DIMENSIONS.values()) if name == "q" else f"as q: {_DIMENSIONS[q.ndim]}"
            raise UserError(f"{file}: {name} has shape {array.shape}, must be {forms}")
        if 0 in array.shape:
            raise UserError(f"{file}: {name} has shape {array.shape}: there is nothing in it")
        if array.dtype != q.dtype:
            raise UserError(f"{file}: {name} holds {array.dtype} and q {q.dtype}: they must be the same")
    rules = (
        (k.shape[:-1] == v.shape[:-1], "k and v must have the same heads and length"),
        (q.shape[:-3] == k.shape[:-3], "q and k must have the same layers and batch"),
        (q.shape[-1] == k.shape[-1], "q and k must have the same head_dim (the last dimension)"),
        (q.shape[-3] % k.shape[-3] == 0, "the heads of k and v must divide those of q"),
    )
    for kept, rule in rules:
        if not kept:
            raise UserError(f"{file}: {rule}; q is {q.shape}, k {k.shape}, v {v.shape}")
    # From here on every tensor is [layers, batch, heads, len, dim].
    q, k, v = (array.reshape((1,) * (5 - array.ndim) + array.shape) for array in (q, k, v))
    if batch >= q.shape[1]:
        raise UserError(f"--batch asks for text {batch}; {file} has texts 0 to {q.shape[1] - 1}")
    w_o = _projection(file, arrays, q.shape[0], q.shape[2] * v.shape[-1], layered=tensors["q"].ndim == 5)
    tokens = _tokens(file, arrays, batch, k.shape)
    length = _length(file, arrays, batch, q.shape, k.shape)
    q, k, v = (array[:, batch, :, :length] for array in (q, k, v))
    return Recording(
        title=file.name,
        layers={n: Layer(q[n], k[n], v[n], None if w_o is None else w_o[n]) for n in range(len(q))},
        tokens=None if tokens is None else tokens[:length],
        causal=bool(_single(file, arrays, "causal", "biu", False)),
        scale=_single(file, arrays, "scale", "fiu", None),
    )


def _load(file: Path) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(file):  # np.load would take other things for pickles, and say so
            pass
        with np.load(file, allow_pickle=False) as saved:
            missing = [name for name in ("q", "k", "v") if name not in saved]
            if missing:
                held = ", ".join(saved.files) or "nothing"
                raise UserError(f"{file} has no array {missing[0]}; it holds {held}, and q, k and v are needed")
            unknown = [name for name in saved.files if name not in _KNOWN]
            if unknown:
                print(f"Note: {file} also holds {', '.join(unknown)}, which is not used.", file=sys.stderr)
            return {name: saved[name] for name in _KNOWN if name in saved}
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    except zipfile.BadZipFile as error:
        raise UserError(f"{file} is not an .npz file (numpy.savez): {error}") from error
    except UserError:
        raise
    except (ValueError, EOFError) as error:
        raise UserError(f"{file} holds an array that cannot be read: {error}") from error


def _floats(file: Path, name: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    array = arrays[name]
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype not in _FLOATS:
        raise UserError(f"{file}: {name} holds {array.dtype}, must hold float32, float64 or float16")
    return array


def _projection(
    file: Path, arrays: Mapping[str, np.ndarray], layers: int, width: int, *, layered: bool
) -> np.ndarray | None:
    """w_o as float [layers, hidden, heads * v_dim]."""
    if "w_o" not in arrays:
        return None
    w_o = _floats(file, "w_o", arrays)
    wanted = (
        f"[layers = {layers}, hidden, heads * v_dim = {width}]" if layered else f"[hidden, heads * v_dim = {width}]"
    )
    if w_o.ndim != 2 + layered or w_o.shape[-1] != width or (layered and len(w_o) != layers):
        raise UserError(f"{file}: w_o has shape {w_o.shape}, must be {wanted}")
    if w_o.dtype == np.float16:  # NumPy multiplies it without a BLAS
        w_o = w_o.astype(np.float32)
    return w_o if layered else w_o[None]


def _tokens(file: Path, arrays: Mapping[str, np.ndarray], batch: int, shape: tuple[int, ...]) -> list[str] | None:
    if "tokens" not in arrays:
        return None
    tokens = arrays["tokens"]
    if tokens.dtype.kind not in "US":
        raise UserError(f"{file}: tokens holds {tokens.dtype}, must hold strings")
    if tokens.shape not in ((shape[-2],), (shape[1], shape[-2])):
        raise UserError(f"{file}: tokens has shape {tokens.shape}, k has {shape[-2]} keys (and a batch of {shape[1]})")
    picked = tokens[batch] if tokens.ndim == 2 else tokens
    if picked.dtype.kind == "S":
        return [token.decode("utf-8", "replace") for token in picked.tolist()]
    return picked.tolist()


def _length(
    file: Path, arrays: Mapping[str, np.ndarray], batch: int, q_shape: tuple[int, ...], k_shape: tuple[int, ...]
) -> int | None:
    """The tokens in use of the chosen text, where the file says so."""
    if "lengths" not in arrays:
        return None
    lengths = arrays["lengths"]
    if lengths.dtype.kind not in "iu" or lengths.shape != (k_shape[1],) or q_shape[-2] != k_shape[-2]:
        raise UserError(
            f"{file}: lengths holds {lengths.dtype} of shape {lengths.shape}, must be {k_shape[1]} integers, beside as "
            "many queries as keys"
        )
    if not 1 <= lengths[batch] <= k_shape[-2]:
        raise UserError(f"{file}: lengths has {lengths[batch]} for text {batch}, must be 1 to {k_shape[-2]}")
    return int(lengths[batch])


def _single(file: Path, arrays: Mapping[str, np.ndarray], name: str, kinds: str, default: Any) -> Any:
    if name not in arrays:
        return default
    array = arrays[name]
    if array.size != 1 or array.dtype.kind not in kinds or not np.isfinite(array).all():
        raise UserError(f"{file}: {name} is {array.dtype} of shape {array.shape}, must be one finite number")
    return array.item()
