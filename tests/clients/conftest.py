"""Programs of this folder run in processes of their own: some import Ray, which must be told first
where to listen. So pytest does not import them to look for doctests."""

from __future__ import annotations

from pathlib import Path

collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("*.py")
    if not path.name.startswith(("test_", "conftest"))
]
