"""The HTML pages: what stands in them, and how a real browser draws them on a phone and on a desk."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import NAMES, Browser, find
from manyhead.report import charts, units, write_compare_page, write_profile_page
from manyhead.report.rows import beyond_limit, curves, labels, of_series
from report_documents import make_comparison, make_document, make_row

PHONE, DESK = 390, 1280
SMALLEST_FONT = 11
LEAST_COLOURED = 50  # pixels: half of one point
HOSTILE = """<script>window.injected=1</script></script>"'&amp;<b>{{7*7}}"""

# --- documents -----------------------------------------------------------------------------------------------------


def without_phases() -> dict[str, Any]:
    document = make_document()
    for row in document["rows"]:
        row["phases"] = None
    return document


def one_row() -> dict[str, Any]:
    return make_document(rows=[make_row("table", "only", "f32 b1 h8 q10 kv10 d64")])


def interrupted() -> dict[str, Any]:
    return make_document(rows=make_document()["rows"][:3], complete=False)


def no_rows() -> dict[str, Any]:
    return make_document(rows=[], complete=False, seconds=0.4)


def no_limits() -> dict[str, Any]:
    document = make_document(limits={})
    for row in document["rows"]:
        row |= {"share": None, "limit": None, "limit_rate": None}
    return document


def nothing_to_compute() -> dict[str, Any]:
    """As where no query may attend to any key: no place on a logarithmic axis."""
    row = one_row()["rows"][0] | {"flops": 0.0, "flops_rate": 0.0}
    return make_document(rows=[row, row | {"series": "sequence", "x": 10}])


def no_l3() -> dict[str, Any]:
    document = make_document()
    document["machine"]["l3_bytes"] = 0
    document["limits"]["read"] = [limit for limit in document["limits"]["read"] if limit["level"] != "L3"]
    return document


def hostile() -> dict[str, Any]:
    document = make_document(arguments=["--name", HOSTILE], manyhead=HOSTILE)
    document["machine"] |= {"cpu": HOSTILE, "os": HOSTILE}
    for row in document["rows"]:
        row |= {"name": HOSTILE, "what": HOSTILE, "note": HOSTILE}
    return document


def many() -> dict[str, Any]:
    """Long names, a long problem, several heads and counters, on a noisy machine."""
    document = make_document()
    document["limits"]["noise"] = 0.31
    rows = document["rows"]
    rows[0]["name"] = "a_workload_whose_name_goes_on_and_on_and_on_for_ever"
    rows[0]["problem"] += (
        " window=256,256 softcap=30 alibi=signed sinks mask bias=f32 keymask lens offsets i64 lse bshd"
    )
    rows += [
        make_row("heads", f"wide_{h}", f"bf16 b1 h{h} q1 kv4096 d{4096 // h}", isa="amx", threads=1, x=h)
        for h in (1, 2, 4, 8, 16, 32, 64)
    ]
    rows += [make_row("table", "old", "f32 b1 h4 q99 kv99 d64", isa=isa) for isa in ("avx512", "avx2", "sse2")]
    for row in rows:
        row["counters"] = {"cycles": 3.1e9, "instructions": 7.7e9, "cache_misses": 12345}
        row["counters_note"] = "the kernel gives out no branch counters"
    rows[1]["phases"] |= {"project": 1e-4, "a phase of a later version": 2e-4}
    document["skipped"] = [
        {key: rows[0][key] for key in ("problem", "dtype", "isa", "threads")}
        | {"name": "huge", "why": "it takes 3 min"}
    ]
    return document


DOCUMENTS = [
    make_document,
    without_phases,
    one_row,
    interrupted,
    no_rows,
    no_limits,
    nothing_to_compute,
    no_l3,
    hostile,
    many,
]


def later(document: dict[str, Any], factor: Callable[[int], float]) -> dict[str, Any]:
    changed = copy.deepcopy(document)
    for index, row in enumerate(changed["rows"]):
        row["seconds"]["best"] *= factor(index)
    return changed


def two() -> dict[str, Any]:
    return make_comparison(make_document(), later(make_document(), lambda index: 0.7 + 0.02 * index))


def three() -> dict[str, Any]:
    document = make_document(complete=False)
    comparison = make_comparison(document, later(document, lambda i: 0.2 + 0.1 * i), later(document, lambda _: 1.01))
    absent = comparison["rows"][1]
    lonely = comparison["rows"][3]
    lonely |= {"ratios": [1.0, None, None], "seconds": [1.0, None, None], "significant": [False, None, None]}
    absent["seconds"][2] = absent["ratios"][2] = absent["significant"][2] = None
    return comparison


def nothing_in_common() -> dict[str, Any]:
    comparison = make_comparison(make_document(), make_document(rows=[]))
    return comparison | {"rows": [], "geomean": [None, None]}


def hostile_names() -> dict[str, Any]:
    comparison = make_comparison(hostile(), hostile())
    for entry in comparison["documents"]:
        entry["label"] = HOSTILE
    return comparison


COMPARISONS = [two, three, nothing_in_common, hostile_names]


def write(make: Callable[[], dict[str, Any]], folder: Path) -> Path:
    file = folder / f"{make.__name__}.html"
    (write_compare_page if make in COMPARISONS else write_profile_page)(make(), file)
    return file


def changed(file: Path, old: str, new: str) -> Path:
    """The page with one thing in it replaced, for tests of the tests."""
    text = file.read_text(encoding="utf-8")
    assert old in text
    broken = file.with_name("broken.html")
    broken.write_text(text.replace(old, new, 1), encoding="utf-8")
    return broken


# --- without a browser ---------------------------------------------------------------------------------------------


class Outline(HTMLParser):
    """Tags that do not match, ids that repeat, and the text outside of scripts and styles."""

    EMPTY = ("meta", "link", "br")

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.wrong: list[str] = []
        self.ids: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(file.read_text(encoding="utf-8"))
        self.close()
        self.wrong += [f"<{tag}> is not closed" for tag in self.open_tags]
        self.wrong += [f"id {name} repeats" for name in set(self.ids) if self.ids.count(name) > 1]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.EMPTY:
            self.open_tags.append(tag)
        self.tags.append((tag, dict(attrs)))
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        if not self.open_tags or self.open_tags.pop() != tag:
            self.wrong.append(f"</{tag}> closes something else")

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open_tags):
            self.text += data


@pytest.mark.parametrize("make", [*DOCUMENTS, *COMPARISONS])
def test_the_page_is_well_formed(make, tmp_path):
    outline = Outline(write(make, tmp_path))
    assert outline.wrong == []
    headings = [int(tag[1]) for tag, _ in outline.tags if re.fullmatch(r"h\d", tag)]
    assert headings[0] == 1 and set(headings[1:]) == {2}
    pictures = [attributes for _, attributes in outline.tags if attributes.get("role") == "img"]
    assert all(len(attributes["aria-label"] or "") > 40 for attributes in pictures)
    assert "None" not in outline.text and "nan" not in outline.text.split()
    assert all(not (attributes.get("src") or "").startswith("http") for _, attributes in outline.tags)


def test_a_profile_tells_all_of_a_row(tmp_path):
    text = Outline(write(make_document, tmp_path)).text
    row = make_document()["rows"][2]
    for word in (row["name"], row["problem"], row["isa"], row["what"], row["limit"], "Example Xeon(R) 8480"):
        assert word in text
    for value in (
        units.duration(row["seconds"]["best"]),
        units.number(row["flops_rate"] / 1e9),
        units.number(row["bytes_rate"] / 1e9),
        units.percent(row["share"]),
        "48 KiB",
        "24 GiB",
        "2.90 GHz to 3.10 GHz",
        "2026-01-31 12:00 UTC",
        "--seconds 0.5",
    ):
        assert value in text
    assert "interrupted" not in text and "noisy" not in text


def test_a_share_beyond_the_limit_is_said_to_be_one(tmp_path):
    document = make_document()
    assert beyond_limit(document["rows"]) == []
    document["rows"][0]["share"] = 1.99
    document["rows"][1]["share"] = 1.004  # shown as 100 %
    assert "1 row above 100% of the limit: it was measured in slower" in Outline(write(lambda: document, tmp_path)).text


def test_one_number_of_threads_is_no_chart(tmp_path):
    rows = [row for row in make_document()["rows"] if row["series"] == "threads"]
    alone = [row for row in rows if row["threads"] == 1]
    for chosen, drawn in ((rows, True), (alone, False)):
        page = write(lambda chosen=chosen: make_document(rows=chosen), tmp_path).read_text()
        assert ('id="chart-threads"' in page) == drawn and "Thread scaling" in page


def test_logarithmic_axes_have_ticks_enough():
    assert charts.log_axis([1.3, 2.75])["ticktext"] == ["20", "50", "100", "200", "500"]
    assert charts.log_axis([-1.2, 0.5])["ticktext"] == ["0.1", "0.2", "0.5", "1", "2"]
    assert charts.log_axis([-0.5, 4])["ticktext"] == ["1", "10", "100", "1,000", "10,000"]


def test_what_is_missing_is_said_in_one_sentence(tmp_path):
    def text(make):
        return Outline(write(make, tmp_path)).text

    assert "Not measured in this run: hardware counters." in text(make_document)
    assert "Not measured in this run: phases, hardware counters." in text(without_phases)
    missing = "Not measured in this run: sequence lengths, thread scaling, the number of heads, hardware counters."
    assert missing in text(one_row)
    assert "This profile is incomplete: the run was interrupted" in text(interrupted)
    assert "the table of workloads, phases, sequence lengths" in text(no_rows)
    assert "the points stand without a roof" in text(no_limits) and "limits were not measured" in text(no_limits)
    assert "L3 cache" in text(make_document) and "L3 cache" not in text(no_l3)
    assert "it takes 3 min" in text(many) and "Note: the kernel gives out no branch counters." in text(many)
    assert "project" in text(many) and "a phase of a later version" in text(many)
    assert "noisy machine: the same short work took 31% longer at times" in text(many)


def test_a_comparison_tells_what_changed(tmp_path):
    comparison = three()
    text = Outline(write(three, tmp_path)).text
    assert "run a is incomplete" in text and f"({units.number(comparison['rows'][0]['ratios'][2])}x)" in text
    assert f"{units.number(comparison['geomean'][1])}x" in text and "the speed of run a, geometric mean" in text
    assert units.duration(comparison["rows"][0]["seconds"][1]) in text
    assert "no workload in common" in Outline(write(nothing_in_common, tmp_path)).text


def test_a_page_without_charts_is_small(tmp_path):
    assert write(no_rows, tmp_path).stat().st_size < 50_000 < 4_000_000 < write(one_row, tmp_path).stat().st_size


def test_plotly_is_inside_once(tmp_path):
    assert write(make_document, tmp_path).read_text(encoding="utf-8").count("* plotly.js v") == 1


def test_units():
    numbers = {0: "0", 1234.5: "1,234", 99.96: "100", 12.34: "12.3", 9.999: "10.0", 1: "1.00", 0.01234: "0.0123"}
    assert {value: units.number(value) for value in numbers} == numbers
    assert [units.number(value) for value in (None, float("nan"), float("inf"))] == ["-"] * 3
    times = {
        2e-9: "2.00 ns",
        3.2e-6: "3.20 us",
        0.99999e-3: "1.00 ms",
        0.5: "500 ms",
        97.3: "97.3 s",
        130: "2 min 10 s",
    }
    assert {value: units.duration(value) for value in times} == times
    assert [units.size(value) for value in (100, 48 << 10, 1.5 * (1 << 20), 503316480)] == [
        "100 B",
        "48 KiB",
        "1.5 MiB",
        "480 MiB",
    ]
    assert units.rate(1.47e12, "FLOP/s") == "1.47 TFLOP/s" and units.rate(2.5e8, "B/s") == "250 MB/s"
    assert [units.percent(value) for value in (0.714, 0.0312, None)] == ["71%", "3.1%", "-"]
    assert units.date("yesterday") == "yesterday" and units.date(None) == "unknown date"


def test_labels_say_no_more_than_is_needed():
    rows = [make_row("table", name, "f32 b1 h4 q9 kv9 d64", isa=isa) for name in "ab" for isa in ("avx2", "sse2")]
    assert labels(rows[::2]) == [("a", ""), ("b", "")]
    assert labels(rows) == [("a", "avx2"), ("a", "sse2"), ("b", "avx2"), ("b", "sse2")]


def test_curves_are_what_differs_only_along_the_axis():
    rows = make_document()["rows"]
    lengths = curves(of_series(rows, "sequence"), "sequence")
    assert {name: [row["x"] for row in group] for name, group in lengths.items()} == {
        name: [2**power for power in range(7, 14)] for name in ("f32 avx512", "bf16 amx", "f32 decode avx512")
    }
    assert [len(group) for group in curves(of_series(rows, "threads"), "threads").values()] == [4, 4]
    assert list(curves(of_series(rows, "threads"), "threads")) == ["llama8b_2k", "gpt2_small"]
    assert list(curves(of_series(rows, "heads"), "heads")) == ["f32 b1 q1024 kv1024 avx512 2 threads"]


# --- in a browser --------------------------------------------------------------------------------------------------


def browser_program() -> str:
    program = find()
    if program is None:
        reason = f"no browser: none of {', '.join(NAMES)} is on the PATH"
        if os.environ.get("MH_NEED_BROWSER") == "1":
            pytest.fail(f"{reason}, and MH_NEED_BROWSER=1 says that there must be one")
        pytest.skip(reason)
    return program


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    running = Browser(browser_program())
    yield running
    running.close()


# What is wrong with the layout, and where each chart is: all in the page's own words.
LOOK = """
(() => {
  const wrong = [], root = document.documentElement;
  const size = (node) => node.getBoundingClientRect();
  if (root.scrollWidth > root.clientWidth) wrong.push(`the page overflows: ${root.scrollWidth} > ${root.clientWidth}`);
  for (const node of document.querySelectorAll("body *:not(.scroll *, .chart *, script, .unseen)")) {
    if (size(node).right > root.clientWidth + 0.5) wrong.push(`${node.tagName} ${node.className} overflows`);
  }
  for (const cell of document.querySelectorAll("th, td")) {
    if (cell.scrollWidth > cell.clientWidth + 1) wrong.push(`a cell is too small: ${cell.textContent}`);
  }
  const charts = [...document.querySelectorAll(".chart")].map((chart) => {
    const name = chart.id, svg = chart.querySelector("svg.main-svg");
    const expected = JSON.parse(document.getElementById(name + "-figure").textContent).data.length;
    if (!svg || size(svg).width < 100 || size(svg).height < 100) { wrong.push(`${name} is not drawn`); return null; }
    if (Math.abs(size(svg).width - chart.clientWidth) > 1) wrong.push(`${name} is not as wide as its place`);
    const traces = [...chart.querySelectorAll(".scatterlayer .trace, .barlayer .trace")]
      .filter((trace) => [...trace.querySelectorAll("path")].some((path) => size(path).width + size(path).height > 1));
    if (!expected || traces.length !== expected) wrong.push(`${name} has ${traces.length} of ${expected} traces`);
    for (const text of chart.querySelectorAll("svg text")) {
      const box = size(text), place = size(svg);
      if (box.width && (box.left < place.left - 1 || box.right > place.right + 1 || box.bottom > place.bottom + 1)) {
        wrong.push(`${name}: "${text.textContent}" is cut off`);
      }
      const font = parseFloat(getComputedStyle(text).fontSize);
      if (box.width && font < SMALLEST) wrong.push(`${name}: "${text.textContent}" is ${font} px small`);
    }
    const legend = chart.querySelector(".legend .bg"), words = [...chart.querySelectorAll(".xtick text, .xtitle")];
    if (legend && words.some((text) => size(text).bottom > size(legend).top + 1)) wrong.push(`${name}: legend on text`);
    const ticks = words.slice(0, -1).map(size).filter((box) => box.width).sort((a, b) => a.left - b.left);
    if (ticks.some((box, i) => i && box.left < ticks[i - 1].right)) wrong.push(`${name}: ticks overlap`);
    const plot = size(chart.querySelector(".nsewdrag"));
    const [x, y, room] = [scrollX, scrollY, 6];  // half a point may stand on the edge
    return [name, plot.left + x - room, plot.top + y - room, plot.right + x + room, plot.bottom + y + room];
  });
  for (const entry of performance.getEntriesByType("resource")) wrong.push(`the page loads ${entry.name}`);
  return { wrong, charts: charts.filter(Boolean), width: innerWidth };
})()
""".replace("SMALLEST", str(SMALLEST_FONT))


def faults(browser: Browser, file: Path, width: int, scheme: str = "light") -> list[str]:
    """All that is wrong with how the browser shows the page."""
    browser.open(file, width, scheme=scheme)
    seen = browser.evaluate(LOOK)
    overflow = (
        [f"the page overflows: a screen of {width} pixels shows {seen['width']}"] if seen["width"] != width else []
    )
    found = [*overflow, *seen["wrong"], *(f"script error: {error}" for error in browser.errors())]
    found += [f"the page asks for {url}" for url in browser.requests()[1:]]
    picture = browser.picture()
    for name, *box in seen["charts"]:
        left, top, right, bottom = (max(0, round(edge)) for edge in box)
        plot = picture[top:bottom, left:right]
        # Axes, grids and texts are grey, data is not.
        coloured = np.sum(plot.max(axis=2) - plot.min(axis=2) > 0.2)
        if coloured < LEAST_COLOURED:
            found.append(f"{name} looks empty: {coloured} of its pixels have a colour")
    return found


@pytest.mark.parametrize("make", [*DOCUMENTS, *COMPARISONS])
def test_the_page_is_drawn(make, browser, tmp_path):
    file = write(make, tmp_path)
    assert {width: faults(browser, file, width) for width in (PHONE, DESK)} == {PHONE: [], DESK: []}


@pytest.mark.parametrize("make", [make_document, two])
def test_the_page_is_drawn_in_the_dark(make, browser, tmp_path):
    assert faults(browser, write(make, tmp_path), PHONE, "dark") == []
    picture = browser.picture()
    assert picture.mean() < 0.25 and np.all(picture[:, :3] < 0.2)
    charts = browser.evaluate("[...document.querySelectorAll('.chart')].map((c) => c.layout.paper_bgcolor)")
    assert set(charts) == {browser.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--surface')")}


def test_workloads_fit_a_desk(browser, tmp_path):
    """What lies beyond the edge of a table's box is seen only by those who scroll it."""
    browser.open(write(make_document, tmp_path), DESK)
    widths = "((box) => [box.scrollWidth, box.clientWidth])(document.querySelector('#workloads .scroll'))"
    needed, there = browser.evaluate(widths)
    assert needed == there


def test_every_chart_is_there(browser, tmp_path):
    """As many points as rows, as many traces as kinds, curves and phases."""
    browser.open(write(make_document, tmp_path), DESK)
    traces = """Object.fromEntries([...document.querySelectorAll(".chart")].map((chart) =>
        [chart.id.slice(6), chart.data.map((trace) => [trace.name, trace.x.length])]))"""
    drawn = browser.evaluate(traces)
    assert list(drawn) == ["roofline", "phases", "sequence", "threads", "heads-0"]
    points = {name: count for name, count in drawn["roofline"] if name.startswith(("prefill", "decode"))}
    assert points == {"prefill f32": 11, "prefill bf16": 11, "decode f32": 5, "decode bf16": 5}
    assert {name for name, _ in drawn["roofline"]} - set(points) == {
        *("read L1", "read L2", "read L3", "read memory", "amx bf16", "avx512 f32")
    }
    phases = ["pack", "QK\u1d40", "mask", "softmax", "PV", "store", "merge", "idle"]
    assert drawn["phases"] == [[name, 32] for name in phases]
    assert drawn["sequence"] == [["f32 avx512", 7], ["bf16 amx", 7], ["f32 decode avx512", 7]]
    assert drawn["threads"] == [["perfect", 2], ["llama8b_2k", 4], ["gpt2_small", 4]]
    assert drawn["heads-0"] == [*([name, 7] for name in phases if name != "mask"), ["time with 1 head", 2]]


def test_hostile_names_are_shown_as_they_are(browser, tmp_path):
    browser.open(write(hostile, tmp_path), DESK)
    assert browser.evaluate("window.injected") is None and browser.errors() == []
    assert browser.evaluate("document.querySelector('h1').textContent") == HOSTILE
    assert HOSTILE in browser.evaluate("document.title")
    tick = browser.evaluate("document.querySelector('#chart-phases .ytick').textContent")
    assert tick == HOSTILE[:17] + "...f32 avx512"


def test_a_point_tells_about_its_row(browser, tmp_path):
    browser.open(write(one_row, tmp_path), PHONE)
    x, y = browser.evaluate("""(() => {
        const point = document.querySelector("#chart-roofline .point");
        point.scrollIntoView({ block: "center" });
        const box = point.getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2];
    })()""")
    browser.page("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    browser.settle()
    text = browser.evaluate("document.querySelector('#chart-roofline .hoverlayer').textContent")
    row = one_row()["rows"][0]
    for word in ("only", row["problem"], "avx512", units.rate(row["flops_rate"], "FLOP/s"), "of the limit"):
        assert word in text
    assert browser.evaluate(LOOK)["wrong"] == []


def test_charts_follow_the_window_the_scheme_and_the_paper(browser, tmp_path):
    browser.open(write(make_document, tmp_path), DESK)
    background = "document.querySelector('.chart').layout.paper_bgcolor"
    light = browser.evaluate(background)
    browser.page("Emulation.setDeviceMetricsOverride", width=PHONE, height=900, deviceScaleFactor=1, mobile=True)
    browser.page("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    browser.settle()
    browser.settle()
    assert browser.evaluate(LOOK)["wrong"] == [] and browser.evaluate("innerWidth") == PHONE
    assert browser.evaluate(background) != light
    browser.page(
        "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    browser.settle()
    assert browser.evaluate(background) == light
    paper = browser.evaluate("document.querySelector('.chart svg').getBoundingClientRect().width")
    assert paper == pytest.approx(180 / 25.4 * 96, abs=1)


BROKEN = {
    "scripts": [
        ("</main>", "<script>throw new Error('thrown')</script></main>", "script error: Error: thrown"),
        ("</main>", "<script>console.error('said aloud')</script></main>", "script error: said aloud"),
        (
            "</main>",
            "<script>Promise.reject(new Error('no promise'))</script></main>",
            "script error: Error: no promise",
        ),
        ("</main>", "<img src='https://example.com/x.png' alt=''></main>", "script error: Loading the image 'https:"),
        ("20rem); overflow-wrap: break-word", "1rem); overflow-wrap: normal", "a cell is too small: avx512"),
        ("</main>", "<div style='width: 2000px'>wide</div></main>", "DIV  overflows"),
    ],
    "figures": [
        ('"data":[{', '"data":[],"other":[{', "chart-roofline has 0 of 0 traces"),
        ('"data":[{', '"data":[{"visible":false,', "chart-phases has 6 of 7 traces"),
    ],
    "small": [('"size":12', '"size":7', "is 7 px small")],
    "large": [('"size":12', '"size":90', "is cut off")],
    "legend": [('"yref":"container"', '"yref":"paper"', "chart-roofline: legend on text")],
    "wide": [("width: chart.clientWidth }", "width: 1500 }", "the page overflows: a screen of 390 pixels shows 15")],
    "blank": [("Plotly.react(chart, data", "Plotly.react(chart, []", "chart-roofline looks empty: 0 of its pixels")],
    "absent": [("await Plotly.react(", "await Promise.reject(", "chart-roofline is not drawn")],
}


@pytest.mark.parametrize("changes", BROKEN.values(), ids=BROKEN)
def test_a_broken_page_is_told(changes, browser, tmp_path):
    """The checks themselves, on pages broken on purpose: each change, and what is then said."""
    file = write(one_row, tmp_path)
    for old, new, _ in changes:
        file = changed(file, old, new)
    found = faults(browser, file, PHONE)
    for _, _, said in changes:
        assert any(said in fault for fault in found), found


def test_a_request_is_told(browser, tmp_path):
    """As above, with the policy that would have stopped it taken out of the page."""
    file = changed(write(no_rows, tmp_path), 'http-equiv="Content-Security-Policy"', 'name="nothing"')
    file = changed(file, "</main>", "<img src='https://example.com/x.png' alt=''></main>")
    assert "the page asks for https://example.com/x.png" in faults(browser, file, PHONE)


def test_a_missing_browser_is_a_failure_where_one_is_needed(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("MH_NEED_BROWSER", "1")
    with pytest.raises(pytest.fail.Exception, match="chromium"):
        browser_program()
    monkeypatch.delenv("MH_NEED_BROWSER")
    with pytest.raises(pytest.skip.Exception, match="none of chromium"):
        browser_program()
