"""The attention problems of a model, read from the config.json that Hugging Face models come with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._user import UserError, read_text
from .cases import Case

Config = dict[str, Any]

# The names that families of models have for one thing.
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
WIDTH = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim")
HEAD_DIM = ("head_dim", "d_kv", "attention_head_dim")
POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx")
PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder", "text_encoder", "audio_encoder")

# Models whose tokens see both ways although nothing in their config.json says so.
ENCODERS = """
    albert bert camembert clip_vision_model deberta deberta-v2 deit dinov2 distilbert electra ernie esm funnel hubert
    longformer modernbert mpnet nomic_bert rembert roberta roformer siglip_text_model siglip_vision_model squeezebert
    vit wav2vec2 xlm-roberta
"""

PROMPTS = (128, 512, 2048)
CONTEXTS = (512, 4096, 32768)
TEXTS = (128, 512)
UNSAID = 2048  # positions of a model that does not say how many it has


def model_cases(path: str | Path) -> list[Case]:
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    text = read_text(file)
    try:
        config = json.loads(text)
    except ValueError as error:
        raise UserError(f"{file} is not the config.json of a model: it is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} is not the config.json of a model: expected a JSON object")
    name = str(config.get("model_type") or file.resolve().parent.name or "model")
    parts = list(_parts(config, name))
    if not parts:
        raise UserError(f"{file} is not the config.json of a model with attention: it has no {' or '.join(HEADS)}")
    try:
        return [case for label, part in parts for case in _cases(label, part)]
    except _Unusable as error:
        raise UserError(f"{file}: {error}") from error


class _Unusable(Exception):
    """What is wrong with a config."""


def _parts(config: Config, name: str) -> Iterator[tuple[str, Config]]:
    """Each tower of a model: it has its own heads."""
    if "encoder_attention_heads" in config or any(key in config for key in HEADS):  # Whisper, BART, Marian: two in one
        yield name, config
    for key in PARTS:
        part = config.get(key)
        if isinstance(part, dict):
            yield from _parts(part, str(part.get("model_type") or f"{name}_{key.removesuffix('_config')}"))


def _cases(name: str, config: Config) -> Iterator[Case]:
    if "encoder_attention_heads" in config:
        yield from _two_stacks(name, config)
    elif config.get("is_encoder_decoder"):  # T5: one size for both
        shape = _shape(config)
        positions = _number(config, POSITIONS) or UNSAID
        yield from _encoder(f"{name}_encoder", shape, positions)
        yield from _decoder(f"{name}_decoder", shape, positions, config)
        yield from _cross(f"{name}_cross", shape, min(positions, TEXTS[-1]))
    elif config.get("patch_size") and config.get("image_size"):
        tokens = _patches(config)
        yield Case(f"{name}_{tokens}", f"b1 {_shape(config).format(q=tokens, kv=tokens)}", f"image of {tokens} tokens")
    elif _is_causal(config):
        yield from _decoder(name, _shape(config), _number(config, POSITIONS) or UNSAID, config)
    else:
        yield from _encoder(name, _shape(config), _number(config, POSITIONS) or UNSAID)


def _two_stacks(name: str, config: Config) -> Iterator[Case]:
    source = _number(config, ("max_source_positions", *POSITIONS)) or UNSAID
    target = _number(config, ("max_target_positions", *POSITIONS)) or UNSAID
    encoder = _shape(config | {"num_attention_heads": config["encoder_attention_heads"]})
    decoder = _shape(config | {"num_attention_heads": config.get("decoder_attention_heads")})
    if "max_source_positions" in config:  # speech: always the whole of it
        yield Case(f"{name}_encoder", f"b1 {encoder.format(q=source, kv=source)}", f"{source} frames of speech")
    else:
        yield from _encoder(f"{name}_encoder", encoder, source)
        source = min(source, TEXTS[-1])
    yield from _decoder(f"{name}_decoder", decoder, target, {})
    yield from _cross(f"{name}_cross", decoder, source)


def _encoder(name: str, shape: str, positions: int) -> Iterator[Case]:
    for n in _lengths(TEXTS, positions):
        yield Case(f"{name}_{n}", f"b1 {shape.format(q=n, kv=n)}", f"text of {n} tokens")
    n = min(TEXTS[0], positions)
    yield Case(f"{name}_b8", f"b8 {shape.format(q=n, kv=n)}", f"8 texts of {n} tokens")


def _decoder(name: str, shape: str, positions: int, config: Config) -> Iterator[Case]:
    window = _window(config)
    everywhere = window and not _has_full_layers(config)
    words = _modifiers(config)
    for n in _lengths(PROMPTS, positions):
        if not everywhere:
            yield Case(f"{name}_prompt_{n}", f"b1 {shape.format(q=n, kv=n)} causal{words}", f"prompt of {n} tokens")
        if window and (everywhere or window < n):
            problem = f"b1 {shape.format(q=n, kv=n)} causal window={window - 1},0{words}"
            yield Case(f"{name}_window_{n}", problem, f"prompt of {n} tokens, the last {window} seen")
    for n in _lengths(CONTEXTS, min(positions, window) if everywhere and window else positions):
        # One query that sees all keys needs no mask; ALiBi has to know that it stands at the end.
        end = " causal align=br" if "alibi" in words else ""
        yield Case(f"{name}_decode_{n}", f"b1 {shape.format(q=1, kv=n)}{end}{words}", f"next token after {n}")


def _cross(name: str, shape: str, source: int) -> Iterator[Case]:
    for n in (1, TEXTS[0]):
        yield Case(f"{name}_{n}", f"b1 {shape.format(q=n, kv=source)}", f"{n} of text read {source} of the input")


def _lengths(wanted: tuple[int, ...], most: int) -> list[int]:
    """Those that fit, or else the most there is."""
    return [n for n in wanted if n <= most] or [most]


def _shape(config: Config) -> str:
    """A problem line with places for the lengths."""
    heads = _number(config, HEADS)
    if heads is None:
        raise _Unusable(f"it has no {' or '.join(HEADS)}")
    plain = _number(config, ("qk_nope_head_dim",))
    if plain:  # DeepSeek: keys have a part that is turned by their place
        turned = _number(config, ("qk_rope_head_dim",)) or 0
        return _line(heads, heads, plain + turned, _number(config, ("v_head_dim",)))
    kv_heads = _number(config, KV_HEADS) or heads
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1
    if heads % kv_heads:
        raise _Unusable(f"{kv_heads} heads of keys and values do not divide {heads} heads")
    head_dim = _number(config, HEAD_DIM)
    if head_dim is None:
        width = _number(config, WIDTH)
        if width is None:
            raise _Unusable(f"it has no {' or '.join(WIDTH)}, and no head_dim")
        if width % heads:
            raise _Unusable(f"{heads} heads do not divide a width of {width}")
        head_dim = width // heads
    return _line(heads, kv_heads, head_dim, None)


def _line(heads: int, kv_heads: int, head_dim: int, v_dim: int | None) -> str:
    groups = f"{heads}/{kv_heads}" if kv_heads != heads else str(heads)
    return f"h{groups} q{{q}} kv{{kv}} d{head_dim}" + (f" v{v_dim}" if v_dim and v_dim != head_dim else "")


def _number(config: Config, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _Unusable(f"its {name} is {json.dumps(value)}, expected a whole number above 0")
        return value
    return None


def _patches(config: Config) -> int:
    sides = []
    for name in ("image_size", "patch_size"):
        value = config[name]
        sides.append(_number({name: value[0] if isinstance(value, list) and value else value}, (name,)) or 1)
    return (sides[0] // sides[1]) ** 2 + 1  # and one for the image as a whole


def _is_causal(config: Config) -> bool:
    kind = config.get("model_type")
    if config.get("is_decoder"):
        return True
    masked = "MaskedLM" in str(config.get("architectures"))
    return not (masked or kind in ENCODERS.split())


def _window(config: Config) -> int | None:
    if config.get("use_sliding_window") is False:
        return None
    return _number(config, ("sliding_window",))


def _has_full_layers(config: Config) -> bool:
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return "full_attention" in kinds
    return bool(config.get("sliding_window_pattern")) or str(config.get("model_type", "")).startswith("gemma")


def _modifiers(config: Config) -> str:
    """What the model does to scores besides the causal mask."""
    words = ""
    softcap = config.get("attn_logit_softcapping")
    if isinstance(softcap, int | float) and softcap > 0:
        words += f" softcap={softcap:g}"
    attention = config.get("attn_config")
    if (
        config.get("alibi")
        or config.get("model_type") == "bloom"
        or (isinstance(attention, dict) and attention.get("alibi"))
    ):
        words += " alibi"
    return words + (" sinks" if config.get("model_type") == "gpt_oss" else "")
