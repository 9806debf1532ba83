"""The demo: sentence embeddings with MiniLM, where manyhead computes the attention of every layer.

    ./dev demo                                  built-in sentences
    ./dev demo "A sentence." "Another one."     your own
    ./dev demo < sentences.txt                  one a line

It prints how similar the sentences are, checks the embeddings against the same model in float64, draws what the heads
attend to, says it in words, and times attention beside the same attention written with NumPy.

The encoder (manyhead.head_analysis.encoder) is plain float32 NumPy; PyTorch is not used.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import numpy as np
    from heads import HeadHabits
    from manyhead.head_analysis.encoder import Encoder, Tokens
    from timing import Call

SENTENCES = (
    "The animal didn't cross the street because it was too tired.",
    "The animal didn't cross the street because it was too wide.",
    "The bank approved the loan yesterday.",
    "She sat on the bank of the river and watched the water.",
    "The lender agreed to the credit.",
    "Yes.",
    "Attention lets every word of a text look at every other word. When a model reads the sentence about the tired "
    "animal, it has to decide what the pronoun refers to, and some of its heads do just that: they send most of their "
    "weight from the pronoun back to the noun. Other heads have simpler habits. One looks at the word before, another "
    "at the word after, and many rest on a marker at the border of the text when they have found nothing of interest.",
)
BATCH = 32  # sentences in a padded batch
TIMED = 4096  # tokens, padding included: batches beyond are not kept for the timing (113 MB of q, k and v for MiniLM)
TABLE = 12  # up to so many sentences the similarities are a table, beyond it the closest pairs
COSINE = 0.999999  # what the float64 check asks for
DRAWN = 40  # tokens in a picture
PAIR_WORTH = 0.05  # a pair of words with a smaller share is not mentioned


class DemoError(Exception):
    """Ends the demo; the text is a sentence for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows ? instead of ending the demo
    options = parse(arguments)
    try:
        run(options)
        sys.stdout.flush()
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"error: standard output could not be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev demo",
        description="Encodes sentences with MiniLM, manyhead computing the attention of every layer: similarities, a "
        "check against float64, pictures of the heads, what each head attends to, and the time beside NumPy.",
        epilog="Without sentences, and with nothing piped in, it takes a few of its own.",
    )
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help="a text to encode; else one a line from stdin")
    parser.add_argument(
        "--layers",
        type=_layers,
        metavar="LIST",
        help="layers to look into, such as 0,5, or all (default: the first, the middle, the last)",
    )
    parser.add_argument("--sentence", type=_positive, default=1, metavar="N", help="which sentence to draw (default 1)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where to write heads-layer<N>.png (default: the current directory)",
    )
    parser.add_argument("--no-pictures", action="store_true", help="write no pictures")
    parser.add_argument(
        "--threads",
        type=_positive,
        metavar="N",
        help="most threads for manyhead and for NumPy's BLAS (default: all CPUs)",
    )
    parser.add_argument(
        "--rounds",
        type=_positive,
        default=10,
        metavar="N",
        help="rounds of the timing, of which the best counts (default 10)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="another BERT encoder: model.safetensors, tokenizer.json, config.json (default: MiniLM)",
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _layers(text: str) -> list[int] | str:
    if text == "all":
        return text
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layer numbers such as 0,5, nor 'all'")
    return sorted({int(part) for part in parts})


def run(options: argparse.Namespace) -> None:
    texts = read_sentences(options.sentences, sys.stdin)
    if options.sentence > len(texts):
        raise DemoError(f"--sentence {options.sentence} asks for a sentence that is not there: {count(texts)}.")
    if options.threads:  # read by the BLAS when NumPy loads it
        os.environ["OPENBLAS_NUM_THREADS"] = str(options.threads)
    manyhead = import_packages(pictures=not options.no_pictures)
    if not options.no_pictures:
        check_writable(options.out)
    encoder = load_model(options.model)
    try:
        show(options, texts, encoder, manyhead)
    except manyhead.Error as error:
        raise DemoError(f"manyhead: {error}") from None


def show(options: argparse.Namespace, texts: list[str], encoder: Encoder, manyhead: Any) -> None:
    """Everything that is printed and drawn, in this order."""
    layers = choose_layers(options.layers, encoder.layers)
    threads = options.threads or manyhead.threads()
    try:
        kernels = manyhead.isa()
    except ValueError as error:  # MH_ISA names no kernels of this build
        raise DemoError(f"manyhead: {error}") from None
    print(
        f"manyhead {manyhead.__version__}, kernels for {kernels}, {count(threads, 'thread')}. "
        f"Model: {encoder.layers} layers, {encoder.heads} heads, head_dim {encoder.head_dim}.\n"
    )
    sentences = encoder.tokenize(texts)
    show_sentences(texts, sentences, encoder.max_tokens)

    seen = encode_all(encoder, sentences, manyhead, layers, options.threads, options.sentence - 1)
    show_similarities(seen.embeddings)
    check_float64(encoder, sentences, seen.embeddings)
    names = show_habits(seen, sentences, options.sentence - 1)
    if not options.no_pictures:
        draw(manyhead, seen.drawn, names, sentences[options.sentence - 1], texts[options.sentence - 1], options.out)
    show_times(manyhead, encoder, seen, options)


def read_sentences(given: Sequence[str], stdin: TextIO | None) -> list[str]:
    """The sentences of the command line, else of a pipe or file at standard input, else the built-in ones."""
    if given:
        texts = [text.strip() for text in given]
        if not all(texts):
            raise DemoError("One of the sentences is empty: give each as one quoted argument.")
        return texts
    if stdin is None or stdin.closed:
        return list(SENTENCES)
    mode = os.fstat(stdin.fileno()).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):  # a terminal, /dev/null
        return list(SENTENCES)
    print("Reading sentences from standard input, one a line.", file=sys.stderr)
    try:
        content = stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DemoError(f"Standard input is not UTF-8 text: {error}.") from None
    if not content:
        print("Standard input is empty: taking the built-in sentences.", file=sys.stderr)
        return list(SENTENCES)
    texts = [line.strip() for line in content.splitlines() if line.strip()]
    if not texts:
        raise DemoError("Standard input holds only blank lines: give one sentence a line.")
    return texts


def import_packages(*, pictures: bool) -> Any:
    """manyhead; everything the demo needs is tried here, so that what is missing is said before any work is done."""
    needed = ["numpy", "safetensors", "tokenizers"] + (["matplotlib"] if pictures else [])
    for name in needed:
        try:
            __import__(name)
        except ImportError as error:
            hint = " (or do without pictures: --no-pictures)" if name == "matplotlib" else ""
            raise DemoError(
                f"The demo needs the Python package {name}: run ./dev demo, which installs it, or "
                f"`pip install {name}`{hint}. ({error})"
            ) from None
    try:
        import manyhead
    except ImportError as error:
        raise DemoError(f"manyhead cannot be loaded: run ./dev demo, which builds it.\n{error}") from None
    return manyhead


def check_writable(folder: Path) -> None:
    """Better now than after the work."""
    from manyhead._user import UserError, check_folder

    try:
        check_folder(folder)
    except UserError as error:
        raise DemoError(f"{error}. Choose another folder with --out, or use --no-pictures.") from None


def load_model(folder: Path | None) -> Encoder:
    from manyhead.head_analysis.encoder import Encoder, ModelError, find_model

    try:
        return Encoder(folder if folder else find_model())
    except ModelError as error:
        raise DemoError(str(error)) from None


def choose_layers(wanted: list[int] | str | None, layers: int) -> list[int]:
    if wanted is None:
        return sorted({0, layers // 2, layers - 1})
    if isinstance(wanted, str):
        return list(range(layers))
    if wanted[-1] >= layers:
        raise DemoError(f"--layers asks for layer {wanted[-1]}; the model has layers 0 to {layers - 1}.")
    return wanted


def show_sentences(texts: Sequence[str], sentences: Sequence[Tokens], limit: int) -> None:
    print(f"{count(texts)}:")
    for number, (text, tokens) in enumerate(zip(texts, sentences, strict=True), 1):
        if number > TABLE:
            print(f"  ... and {len(texts) - TABLE} more")
            break
        print(f"{number:4}  {clip(text, 80)}  [{count(len(tokens), 'token')}]")
    for number, tokens in enumerate(sentences, 1):
        if tokens.cut:
            print(f"Note: sentence {number} is longer than {limit} tokens: the last {tokens.cut} are left out.")
    print()


class Seen:
    """What encoding left behind: embeddings, weights of the drawn sentence, habits, and one batch's tensors."""

    def __init__(self, embeddings: np.ndarray, habits: dict[int, HeadHabits]) -> None:
        self.embeddings = embeddings
        self.habits = habits  # of each chosen layer
        self.drawn: dict[int, np.ndarray] = {}  # of each chosen layer, the drawn sentence's [heads, len, len]
        self.calls: list[Call] = []  # q, k, v, lengths of each layer of the first batches


def encode_all(
    encoder: Encoder, sentences: Sequence[Tokens], manyhead: Any, layers: Sequence[int], threads: int | None, drawn: int
) -> Seen:
    """Encodes in padded batches; of the chosen layers the attention weights are asked for too."""
    import numpy as np
    from heads import HeadHabits
    from manyhead.head_analysis.encoder import make_batches

    seen = Seen(
        np.empty((len(sentences), encoder.hidden), np.float32), {layer: HeadHabits(encoder.heads) for layer in layers}
    )
    batches = make_batches(sentences, BATCH)
    slots = sum(len(batch) * len(sentences[batch[0]]) for batch in batches)
    padding = 1 - sum(map(len, sentences)) / slots
    print(
        f"Encoding in {count(len(batches), 'padded batch', 'padded batches')}"
        + (f" ({padding:.0%} of the slots are padding; manyhead is told each length)" if padding else "")
        + f", with the weights of {count(len(layers), 'layer')} for a look into the heads ..."
    )
    start = time.perf_counter()
    kept = 0
    for batch in batches:
        kept += len(batch) * len(sentences[batch[0]])
        keep = kept <= TIMED or not seen.calls

        def attention(
            layer: int,
            q: np.ndarray,
            k: np.ndarray,
            v: np.ndarray,
            lengths: np.ndarray,
            batch: list[int] = batch,
            keep: bool = keep,
        ) -> np.ndarray:
            if keep:
                seen.calls.append((q, k, v, lengths))
            wanted = layer in seen.habits
            result = manyhead.attention(
                q, k, v, seqused_k=lengths, layout="bshd", threads=threads, return_weights=wanted
            )
            if not wanted:
                return result
            for entry, index in enumerate(batch):
                length = len(sentences[index])
                weights = result.weights[entry, :, :length, :length]
                seen.habits[layer].add(weights, sentences[index])
                if index == drawn:
                    seen.drawn[layer] = weights.copy()
            return result.out

        seen.embeddings[batch] = encoder.encode([sentences[index] for index in batch], attention)
    print(f"  {(time.perf_counter() - start) * 1e3:.0f} ms\n")
    return seen


def show_similarities(embeddings: np.ndarray) -> None:
    similarity = embeddings @ embeddings.T
    size = len(similarity)
    if size == 1:
        print("One sentence: give two or more to compare them.\n")
        return
    if size <= TABLE:
        print("Similarity (cosine):")
        print("      " + "".join(f"{number:6}" for number in range(1, size + 1)))
        for number, row in enumerate(similarity, 1):
            print(f"{number:6}" + "".join(f"{value:6.2f}" for value in row))
        print()
        return
    import numpy as np

    first, second = np.triu_indices(size, 1)
    values = similarity[first, second]
    print(f"The closest pairs of {size} sentences (cosine):")
    for pair in np.argsort(-values, kind="stable")[:10]:
        print(f"  {values[pair]:.2f}  {first[pair] + 1} and {second[pair] + 1}")
    print()


def check_float64(encoder: Encoder, sentences: Sequence[Tokens], embeddings: np.ndarray) -> None:
    import numpy as np
    from exact import exact_embedding

    print("Checking against the same model in float64, each sentence alone, plain attention ...")
    worst, difference = 1.0, 0.0
    for tokens, embedding in zip(sentences, embeddings.astype(np.float64), strict=True):
        exact = exact_embedding(
            encoder.weights, tokens.ids, layers=encoder.layers, heads=encoder.heads, eps=encoder.eps
        )
        cosine = float(embedding @ exact / np.linalg.norm(embedding))
        worst = cosine if not cosine >= worst else worst  # keeps a NaN
        difference = max(difference, float(np.abs(embedding - exact).max()))
    if not worst >= COSINE:
        raise DemoError(f"The embeddings differ from float64: the smallest cosine is {worst:.9f}, wanted {COSINE}.")
    print(f"  ok: smallest cosine 1 - {max(0.0, 1 - worst):.0e}, largest difference of a component {difference:.0e}\n")


def show_habits(seen: Seen, sentences: Sequence[Tokens], drawn: int) -> dict[int, list[str]]:
    """Prints what each head attends to most; returns the titles of the pictures."""
    from heads import strongest_pair

    scope = "over all sentences" if len(sentences) > 1 else "in the sentence"
    titles: dict[int, list[str]] = {}
    for layer, habits in seen.habits.items():
        pairs = [strongest_pair(weights, sentences[drawn]) for weights in seen.drawn[layer]]
        names = [habits.name(head, pair) for head, pair in enumerate(pairs)]
        notable = [
            str(pair) if pair and pair.share >= PAIR_WORTH and str(pair) != name else ""
            for name, pair in zip(names, pairs, strict=True)
        ]
        print(f"Layer {layer}: what each head attends to most {scope}; strongest pair of words in sentence {drawn + 1}")
        width = max(map(len, names))
        for head, (name, pair) in enumerate(zip(names, notable, strict=True)):
            print(f"  head {head:2}: {name:{width}}  {pair}".rstrip())
        print()
        texts = zip(names, notable, strict=True)
        titles[layer] = [f"head {head}: {name}\n{pair}".rstrip() for head, (name, pair) in enumerate(texts)]
    return titles


def draw(
    manyhead: Any,
    drawn: dict[int, np.ndarray],
    titles: dict[int, list[str]],
    tokens: Tokens,
    text: str,
    folder: Path,
) -> None:
    from manyhead.head_analysis.pictures import save_png

    print(f"Drawing {count(len(drawn), 'layer')} ...")
    for layer, weights in drawn.items():
        figure = manyhead.show_heads(
            weights, tokens.pieces, titles=titles[layer], title=text, layer=layer, max_tokens=DRAWN
        )
        file = folder / f"heads-layer{layer}.png"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_png(figure, file)
        except OSError as error:
            raise DemoError(f"{file} cannot be written: {error.strerror}.") from None
        print(f"  wrote {file.resolve()}")
    if len(tokens) > DRAWN:
        print(f"  (the first {DRAWN} of its {len(tokens)} tokens)")
    print()


def show_times(manyhead: Any, encoder: Encoder, seen: Seen, options: argparse.Namespace) -> None:
    import numpy as np
    from numerics import numpy_attention, numpy_attention_one_by_one
    from timing import compare

    heads, head_dim = seen.calls[0][0].shape[2:]
    batches = seen.calls[:: encoder.layers]
    timed = sum(len(lengths) for *_, lengths in batches)
    print(
        f"Time in attention: {count(encoder.layers, 'layer')} of {count(timed)} in "
        f"{count(len(batches), 'padded batch', 'padded batches')}, {heads} heads, head_dim {head_dim}, float32; "
        f"the best of {count(options.rounds, 'alternating round')} ..."
    )
    mine, *others = compare(
        {
            "manyhead": lambda q, k, v, lengths: manyhead.attention(
                q, k, v, seqused_k=lengths, layout="bshd", threads=options.threads
            ),
            f"NumPy ({blas_name(np)})": lambda *call: numpy_attention(*call)[0],
            "NumPy, each sentence alone, no padding": numpy_attention_one_by_one,
        },
        seen.calls,
        options.rounds,
    )
    for other in others:
        if not other.difference <= 1e-4:
            raise DemoError(f"manyhead and {other.name} disagree by {other.difference:.1e}: nothing was timed.")
    print(f"  {mine.name:40} {mine.seconds * 1e3:9.3f} ms")
    for other in others:
        print(f"  {other.name:40} {other.seconds * 1e3:9.3f} ms   {other.seconds / mine.seconds:.1f} x manyhead's time")


def blas_name(np: Any) -> str:
    """The BLAS in NumPy, such as "OpenBLAS 0.3.31"; NumPy before 1.26 does not say."""
    try:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    except (TypeError, KeyError):
        return "its BLAS"
    name = "OpenBLAS" if "openblas" in blas["name"].lower() else blas["name"]
    return f"{name} {blas['version']}" if blas.get("version", "unknown") != "unknown" else name


def count(what: Any, one: str = "sentence", many: str = "") -> str:
    """1 sentence, 2 sentences."""
    number = what if isinstance(what, int) else len(what)
    return f"{number} {one if number == 1 else many or one + 's'}"


def clip(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 4].rstrip() + " ..."


if __name__ == "__main__":
    sys.exit(main())
