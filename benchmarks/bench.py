"""`make bench`: every section of the benchmark in turn, one table at the end.

    make bench BENCH_ARGS="--quick"
    python -m benchmarks.bench --only throughput,single -- --max-num-seqs 128

Each run is a process of its own, on an otherwise idle machine or the figures mean little. They are
kept under build/bench, where `python -m benchmarks.report` reads them for docs/performance.md.
"""

from __future__ import annotations

from benchmarks.alternate import say
from benchmarks.machine import Machine
from benchmarks.options import parse
from benchmarks.queue_rate import queue_rate
from benchmarks.roofline import roofline
from benchmarks.sections import SECTIONS
from benchmarks.store import save
from benchmarks.tables import HEADINGS, Row, print_table, rows_of

ALL_SECTIONS = {**SECTIONS, "queue": queue_rate, "roofline": roofline}
_QUICK = ("throughput", "step", "static", "single", "shared", "chunking", "queue", "roofline")


def main() -> None:
    """Measure what was asked for, keep it, print it."""
    options = parse(__doc__ or "")
    names = options.only or (_QUICK if options.is_quick else tuple(ALL_SECTIONS))
    if unknown := set(names) - set(ALL_SECTIONS):
        raise SystemExit(f"no section {', '.join(unknown)}; there are {', '.join(ALL_SECTIONS)}")
    say(str(Machine.here()))
    rows: list[Row] = []
    for name in names:
        data = ALL_SECTIONS[name](options)
        save(name, options, data)
        rows += [(f"{name}: {what}", figure) for what, figure in rows_of(name, data)]
    print_table(HEADINGS, rows)


if __name__ == "__main__":
    main()
