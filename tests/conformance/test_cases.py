"""Every stored case against its expected results, with the arrays as stored and laid out in memory in other ways."""

from __future__ import annotations

import adapter
import cases
import numpy as np
import pytest

FILES = cases.files()

# Only cases that call something else, or quantised keys and values, may be skipped.
IN_THIS_RELEASE = ("attention", "merge_states", "multi_head_attention")


def outcome(check: cases.Check, results: dict[str, np.ndarray]) -> np.ndarray:
    """The result that a check is about."""
    if check.name == "qk_matmul_output":  # the ONNX operator's output at a stage that the call chose
        return results["scores"] if "scores" in results else results["weights"]
    return results.get(check.name.split()[0], results["out"])


def run(case: cases.Case, change=lambda array: array) -> None:
    for call in case.calls:
        arguments = [change(array) for array in call.arguments]
        results = adapter.FUNCTIONS[call.function](*arguments, **call.options)
    assert len(case.calls) == 1
    for check in case.checks:
        result = outcome(check, results)
        if result.ndim == 4 and check.expected.ndim == 3:  # ONNX's three-dimensional tensors
            result = result.transpose(0, 2, 1, 3).reshape(check.expected.shape)
        assert result.shape == check.expected.shape, check.name
        np.testing.assert_allclose(
            result.astype(np.float64), check.expected.astype(np.float64), check.rtol, check.atol, err_msg=check.name
        )


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_case(path):
    case = cases.read(path)
    try:
        run(case)
    except adapter.NotInThisRelease as reason:
        absent = case.calls[0].function not in IN_THIS_RELEASE or "k_scale" in case.calls[0].options
        assert absent, reason
        pytest.skip(f"not part of this release: {reason}")


def transposed(array):
    """The same values with the two middle dimensions swapped in memory."""
    return np.ascontiguousarray(array.swapaxes(-2, -3)).swapaxes(-2, -3)


def backwards(array):
    """The same values with the last dimension stored from its end, every second element."""
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    view = wide[..., ::-2]
    view[...] = array
    return view


ATTENTION = [
    path
    for path in FILES
    if path.stem.startswith(("onnx__test_attention", "onnx__test_flex", "torch")) and "__present" not in path.stem
]


@pytest.mark.parametrize("change", [transposed, backwards])
@pytest.mark.parametrize("path", ATTENTION, ids=[path.stem for path in ATTENTION])
def test_case_in_other_memory(path, change):
    run(cases.read(path), change)


def test_the_cases_are_there():
    """An empty folder must not look like success."""
    functions = [cases.read(path).calls[0].function for path in FILES]
    assert functions.count("attention") >= 79
    assert functions.count("multi_head_attention") >= 2
