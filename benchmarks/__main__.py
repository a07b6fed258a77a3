"""``python -m benchmarks``: measure Holdfast beside its peers, on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.run import SECTIONS, run_all
from holdfast.errors import HoldfastError


def main() -> int:
    """Measure what the command line asks for; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME",
        help=f"run only this section; repeatable. One of: {', '.join(SECTIONS)}",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes, rough numbers")
    parser.add_argument(
        "--out", type=Path, metavar="FILE",
        help="write the page here; with --only, put these sections into it",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    asked = parser.parse_args()
    try:
        results = run_all(only=tuple(asked.only), quick=asked.quick, out=asked.out)
    except HoldfastError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if asked.json:
        print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
