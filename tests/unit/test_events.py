"""Events survive their JSON line, and a broken sink never stops training."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import events
from holdfast.errors import InvalidRequestError


def test_every_kind_of_event_survives_its_json_line() -> None:
    samples = {"int": 3, "float": 0.5, "str": "why", "int | None": None, "float | None": 0.25,
               "str | None": "so", "bool": True,
               "tuple[int, ...]": (1, 2)}  # fmt: skip
    for cls in events.KINDS.values():
        fields = {
            name: samples[kind]
            for name, kind in cls.__annotations__.items()
            if not kind.startswith("ClassVar")
        }
        event = cls(time=7.0, **fields)
        assert events.from_json(events.to_json(event)) == event


@pytest.mark.parametrize("line", ["", "{}", "[]", '{"kind": "nope"}', '{"kind": "save_failed"}'])
def test_what_is_no_event_is_refused(line: str) -> None:
    with pytest.raises(InvalidRequestError):
        events.from_json(line)


def test_file_of_a_killed_writer_reads_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events.jsonl"
    log = events.EventLog([events.json_lines(path)], clock=lambda: 1.0)
    log.emit(events.SaveFailed(step=1, error="a"))
    log.emit(events.SaveFailed(step=2, error="b"))
    with path.open("a") as out:
        out.write('{"kind": "save_fai')
    assert [event.step for event in events.read_events(path)] == [1, 2]  # type: ignore[attr-defined]
    log = events.EventLog([events.json_lines(path)], clock=lambda: 2.0)
    log.emit(events.SaveFailed(step=3, error="c"))
    assert [event.step for event in events.read_events(path)] == [1, 2, 3]  # type: ignore[attr-defined]


def test_a_line_nested_beyond_all_depth_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    deep = '{"kind":' + "[" * 100_000 + "]" * 100_000 + "}"
    path.write_text(f"{deep}\n")
    assert list(events.read_events(path)) == []
    with pytest.raises(InvalidRequestError):
        events.from_json(deep)


def test_broken_sink_is_dropped_once_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[events.Event] = []

    def broken(event: events.Event) -> None:
        raise OSError("disk full")

    log = events.EventLog([broken, seen.append], clock=lambda: 2.0)
    for step in range(3):
        log.emit(events.SaveFailed(step=step, error="x"))
    assert len(seen) == 3
    assert capsys.readouterr().err.count("disk full") == 1
