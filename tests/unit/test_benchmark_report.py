"""The benchmark's report: figures that were kept go into the document and the plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.bench import ALL_SECTIONS
from benchmarks.compare import HEADINGS, renewed, row
from benchmarks.options import Options
from benchmarks.plots import PLOTS, draw_all
from benchmarks.store import load, save
from benchmarks.systems.registry import PEERS, SYSTEMS
from benchmarks.tables import rows_of

SYSTEM: dict[str, Any] = {
    "version": "x 1",
    "output_tokens_per_s": 200.0,
    "all_output_tokens_per_s": [190.0, 200.0, 210.0],
    "ttft_p50_s": 0.1,
    "ttft_p99_s": 0.2,
    "tpot_p50_s": 0.01,
    "tpot_p99_s": 0.02,
    "ttft_s": [0.1, 0.2],
    "tpot_s": [0.01, 0.02],
    "peak_rss_bytes": 10**9,
    "num_prompt_tokens": 100,
    "num_output_tokens": 50,
    "slot_use": 0.5,
    "slots_over_time": [(0.1, 4), (0.2, 3)],
}
BOTH = {
    "engine": SYSTEM,
    "redis": SYSTEM,
    "ratio": 0.97,
    "bulk": SYSTEM,
    "bulk_ratio": 0.99,
    "transport_cpu_s": 0.5,
}
POINTS = {
    "points": [
        {"at": at, "output_tokens_per_s": 5.0, "total_tokens_per_s": 15.0} for at in (64, 128)
    ]
}
BUDGET = {
    "budget": 128,
    "is_chunked": True,
    "num_decodes": 3,
    "before_p99_s": 0.01,
    "during_p99_s": 0.015,
    "rise": 1.5,
    "long_ttft_s": 2.0,
    "step_s": [0.01] * 20,
    "num_before": 15,
}
WORKERS = {"num_workers": 1, "claims_per_s": 900.0, "redis_cpu_us": 100.0, "worker_cpu_us": 800.0}
LIMIT = {
    f"{kind}{what}_tokens_per_s": 500.0
    for kind in ("bfloat16", "int8")
    for what in ("", "_products")
}
PAIR = {
    "workload": "mixed",
    "peer": "vllm",
    "num_requests": 256,
    "ours": SYSTEM,
    "theirs": SYSTEM,
    "ratio": 1.25,
    "bulk": SYSTEM,
    "bulk_ratio": 1.5,
}
DATA: dict[str, dict[str, Any]] = {
    "throughput": BOTH,
    "step": {"split_s": {"linears": 3.0, "sampling": 1.0}},
    "static": {"static": SYSTEM, "continuous": SYSTEM, "gain": 1.5},
    "single": BOTH,
    "shared": BOTH,
    "bursty": {"redis": SYSTEM},
    "long": {"engine": SYSTEM},
    "chunking": {"budgets": [BUDGET, {**BUDGET, "budget": 2112, "is_chunked": False}]},
    "num_requests": POINTS,
    "prompt_length": POINTS,
    "num_workers": POINTS,
    "queue": {"points": [{**WORKERS, "redis_use": 0.1}]},
    "roofline": {
        "bfloat16_flop_per_s": {"64": 4e11},
        "int8_op_per_s": {"64": 8e11},
        "bandwidth_bytes_per_s": 2e10,
        "lone_decode_s": 0.0135,
        "limits": {"mixed": LIMIT},
    },
}


@pytest.fixture
def figures(tmp_path: Path) -> Path:
    """Return a folder with figures of every section."""
    for name, data in DATA.items():
        save(name, Options(), data, tmp_path)
    save("peers", Options(), {"pairs": [PAIR]}, tmp_path)
    return tmp_path


def test_every_section_of_the_benchmark_has_rows() -> None:
    """Whatever is measured is printed, each figure under a name."""
    assert set(DATA) == set(ALL_SECTIONS)
    for name, data in DATA.items():
        assert all(what and figure for what, figure in rows_of(name, data))


def test_a_step_is_split_into_shares() -> None:
    """The table shows what each part of a step took, in percent of all, and in seconds."""
    rows = dict(rows_of("step", DATA["step"]))
    assert rows == {"linears": "75.0 %, 3.00 s", "sampling": "25.0 %, 1.00 s"}


def test_figures_stand_between_the_markers(figures: Path) -> None:
    """A table replaces what stood between its markers, and nothing else is touched."""
    text = "a\n<!-- bench:static -->\nold\n<!-- /bench:static -->\nz\n"
    filled = report.filled(text, figures)
    assert filled.startswith("a\n<!-- bench:static -->\n| what | figure |")
    assert filled.endswith("<!-- /bench:static -->\nz\n")
    assert "| continuous ÷ static | 1.50 |" in filled
    assert report.filled(filled, figures) == filled


def test_what_was_not_measured_stays_as_it_is(tmp_path: Path) -> None:
    """A report after one section keeps the figures of the others."""
    text = "<!-- bench:static -->\nolder figures\n<!-- /bench:static -->"
    assert report.filled(text, tmp_path) == text


def test_plots_that_were_drawn_are_shown(tmp_path: Path) -> None:
    """The document shows the plots in its folder of images, and links to no other."""
    (tmp_path / "slots.svg").write_text("<svg/>")
    text = "<!-- bench:plots -->\n<!-- /bench:plots -->"
    assert "![slots](images/slots.svg)\n" in report.filled(text, tmp_path, tmp_path)


def test_the_document_has_a_place_for_every_section() -> None:
    """No figure is measured that the document cannot show."""
    text = report.DOCUMENT.read_text("utf-8")
    for name in (*ALL_SECTIONS, "peers", "peers-int8", "plots"):
        assert f"<!-- bench:{name} -->\n" in text
        assert f"<!-- /bench:{name} -->" in text


def test_figures_come_with_machine_command_and_day(figures: Path) -> None:
    """What is kept says what it was made on."""
    kept = load("static", figures)
    assert kept is not None
    assert kept["data"]["gain"] == 1.5
    assert "CPUs" in kept["machine"]
    assert kept["options"]["dtype"] == "bfloat16"


def test_a_peer_that_cannot_run_is_in_the_table() -> None:
    """A failed peer has a line that says so, as long as the others."""
    failed = row({"workload": "mixed", "peer": "vllm", "num_requests": 8, "failed": "ended with 1"})
    assert len(failed) == len(HEADINGS) == len(row(PAIR))
    assert "ended with 1" in failed


def test_peers_are_systems_with_environments_of_their_own() -> None:
    """No peer runs in the project's environment, and each of ours does."""
    assert all(SYSTEMS[name].environment for name in PEERS)
    assert not any(SYSTEMS[name].environment for name in set(SYSTEMS) - set(PEERS))


def test_every_plot_is_drawn_from_its_section(figures: Path, tmp_path: Path) -> None:
    """Each plot is an SVG file, small enough to be kept."""
    images = draw_all(tmp_path / "images", figures)
    assert [image.stem for image in images] == list(PLOTS)
    for image in images:
        assert image.read_text("utf-8").lstrip().startswith("<?xml")
        assert image.stat().st_size < 60_000


def test_a_plot_that_did_not_change_is_the_same_file(tmp_path: Path) -> None:
    """Drawing twice gives the same bytes, so a commit shows only what is new."""
    save("static", Options(), DATA["static"], tmp_path)
    (first,), (second,) = (draw_all(tmp_path / name, tmp_path) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_pairs_of_an_earlier_run_are_kept_until_they_are_measured_again() -> None:
    """Peers can be run one at a time: each takes its own place in the table, and no other's."""
    first = [{"workload": "mixed", "peer": peer, "ratio": 1.0} for peer in ("vllm", "openvino")]
    again = {"workload": "mixed", "peer": "vllm", "ratio": 1.2}
    other = {"workload": "single", "peer": "vllm", "ratio": 1.6}
    assert renewed(first, [again, other]) == [again, first[1], other]
