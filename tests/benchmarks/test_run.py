"""Every section runs for real at a tiny size, and the document says what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.run import SECTIONS, run_all
from holdfast.errors import InvalidRequestError


def test_every_section_measures_something_and_is_json(bench: tuple[dict, Path]) -> None:
    results, _ = bench
    assert [section["name"] for section in results["sections"]] == list(SECTIONS)
    assert json.loads(json.dumps(results)) == results
    for section in results["sections"]:
        assert section["sheets"] and section["text"]
        for ratio in section["ratios"]:
            assert ratio["peer"] > 0, ratio["name"]


def test_document_names_every_target_and_shows_every_picture(bench: tuple[dict, Path]) -> None:
    results, out = bench
    text = out.read_text(encoding="utf-8")
    summary = text.partition("## Targets")[2].partition("\n## ")[0]
    for section in results["sections"]:
        for ratio in section["ratios"]:
            assert (ratio["target"] is not None) == (f"| {ratio['name']} |" in summary)
        for plot in section["plots"]:
            picture = out.parent / "img" / f"{plot['name']}.png"
            assert f"](img/{plot['name']}.png)" in text
            assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Quick run" in text and "make bench" in text


def test_scratch_files_are_gone(bench: tuple[dict, Path]) -> None:
    _, out = bench
    assert sorted(path.name for path in out.parent.iterdir()) == ["benchmarks.md", "img"]


def test_peers_hold_every_byte_and_the_step_they_were_taken_at(bench: tuple[dict, Path]) -> None:
    results, _ = bench
    peers = next(section for section in results["sections"] if section["name"] == "peers")
    for way, _, _, megabytes, _, holds in peers["sheets"][0]["rows"]:
        assert float(megabytes) > 0, way
        if not way.startswith("DCP"):
            assert holds == "yes", way


def test_unknown_section_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match="kernels"):
        run_all(only=("speed",))
