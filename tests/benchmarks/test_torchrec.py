"""The TorchRec section saves and loads for real, with two ranks and with one."""

from __future__ import annotations

from types import SimpleNamespace

SECTION = "torchrec"


def test_every_way_saves_and_ours_hold_their_step(section: SimpleNamespace) -> None:
    """All six ways were measured; what ours restore is what was saved."""
    rows = section.sheets[0].rows
    assert len(rows) == 6
    for way, *_, megabytes, _, _, holds in rows:
        assert float(megabytes) > 0, way
        if way.startswith("holdfast"):
            assert holds == "yes", way


def test_ours_loads_columns_that_are_cut_otherwise(section: SimpleNamespace) -> None:
    """Row-wise state of two cuts becomes that of one."""
    ours = [found for found in section.findings if found.startswith("holdfast")]
    assert len(ours) == 1 and "is loaded" in ours[0]
