"""What is told of a training follows from its events alone."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from holdfast import events
from holdfast.report import story, training
from holdfast.report.soundness import DamageLine, Soundness, render
from holdfast.report.timeline import draw_timeline

OPENED = events.RunOpened(
    url="runs/x", strategy="check-n-run", tables=1, rows=10, row_bytes=1000, last_step=None, time=0
)


def progress(step: int, at: float, **more) -> events.TrainProgress:
    fields = {"steps_total": 40, "samples": step * 8, "loss": 0.5, "seconds": at} | more
    return events.TrainProgress(step=step, time=at, **fields)


def staged(step: int, at: float) -> events.SaveStaged:
    return events.SaveStaged(step=step, rows=5, bytes=100, stall_s=0.01, time=at)


def durable(step: int, at: float, kind: str = "delta", size: int = 50) -> events.SaveDurable:
    return events.SaveDurable(
        step=step, checkpoint=kind, codec="asym8", rows=5, bytes=size, full_bytes=1000,
        stall_s=0.02, durable_s=0.1, time=at,
    )  # fmt: skip


def killed_and_resumed() -> list[events.Event]:
    return [
        OPENED,
        progress(5, 1.0),
        staged(10, 2.0),
        durable(10, 2.5, "base", 200),
        progress(14, 3.0),
        # the kill comes at 3.25
        OPENED,
        events.Restored(step=10, rows=10, bytes=200, seconds=0.125, restores=1, time=5.0),
        progress(12, 6.0, samples=16, seconds=0.5),
        durable(20, 7.0),
        progress(40, 9.0, samples=240, seconds=3.5, loss=0.4),
        progress(40, 9.5, samples=240, seconds=3.5, loss=0.4, auc=0.75),
    ]


def shown(renderable: object, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


def test_summary_adds_up_both_processes() -> None:
    told = training.summarize(killed_and_resumed(), best_auc=0.8)
    assert (told.url, told.steps, told.resumed_from) == ("runs/x", 40, 10)
    assert (told.auc, told.best_auc, told.loss) == (0.75, 0.8, 0.4)
    assert told.seconds == 3.0 + 3.5
    assert told.samples == 14 * 8 + 240
    assert [(c.step, c.kind) for c in told.checkpoints] == [(10, "base"), (20, "delta")]
    assert (told.bytes, told.full_bytes) == (250, 2000)
    assert told.stall_s == pytest.approx(0.04)


def test_summary_of_nothing_is_empty_and_can_be_shown() -> None:
    told = training.summarize([])
    assert told.to_dict()["samples_per_s"] is None
    assert "steps" in shown(training.summary_table(told))


def test_a_long_table_shows_the_last_lines_and_how_many_are_hidden() -> None:
    told = training.summarize([durable(step, step) for step in range(1, 31)])
    text = shown(training.checkpoints_table(told, lines_max=4))
    assert "26 earlier" in text
    assert [word for word in ("26 ", "27 ", "28 ", "29 ", "30 ") if word in text]
    assert "asym8" in text
    assert text.count("delta") == 4


def test_the_kill_is_counted_from_the_checkpoint_that_was_resumed() -> None:
    kill = story.find_kill(killed_and_resumed(), killed_at=3.25)
    assert (kill.step, kill.resumed_from, kill.lost_steps) == (14, 10, 4)
    assert kill.lost_s == 3.25 - 2.0
    assert kill.down_s == 6.0 - 0.5 - 3.25
    assert (kill.load_s, kill.load_bytes) == (0.125, 200)


def test_the_story_fits_eighty_columns_and_names_every_number() -> None:
    happened = killed_and_resumed()
    told = story.Story(
        training=training.summarize(happened, best_auc=0.8),
        kill=story.find_kill(happened, killed_at=3.25),
        uninterrupted_auc=0.7512,
        is_sound=True,
        seconds=12.0,
        picture=Path("runs/x/timeline.png"),
    )
    text = shown(story.render(told))
    assert max(map(len, text.splitlines())) <= 80
    for fact in ("step 14", "step 10", "4 steps", "0.7500", "0.7512", "0.8000", "12.5 %"):
        assert fact in text
    assert told.to_dict()["kill"]["lost_steps"] == 4


def test_the_picture_is_written(tmp_path: Path) -> None:
    happened = killed_and_resumed()
    kill = story.find_kill(happened, killed_at=3.25)
    assert draw_timeline(happened, kill, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def soundness(*damages: DamageLine) -> Soundness:
    return Soundness("u", 1, 2, 3, 4, 0.5, (10, 20, 30), damages)


def test_damage_names_the_place_and_where_to_go_back_to() -> None:
    text = shown(render(soundness(DamageLine("objects/a.hf[0:9]", "checksum mismatch", (30,)))))
    assert "damaged" in text
    assert "objects/a.hf[0:9]" in text
    assert "ck.restore(20, discard_later=True)" in " ".join(text.split())


def test_damage_behind_the_last_checkpoint_lets_training_resume() -> None:
    assert "can resume" in shown(render(soundness(DamageLine("o", "e", (10,)))))


def test_damage_everywhere_leaves_nothing() -> None:
    found = soundness(DamageLine("o", "e", (10, 20, 30)))
    assert found.sound_steps == ()
    assert "no checkpoint" in shown(render(found))


def test_damages_beyond_what_anybody_reads_are_counted() -> None:
    text = shown(render(soundness(*[DamageLine(f"o{n}", "e", ()) for n in range(1000)])))
    assert "1,000 damages" in text and "800 more damages" in text and "o199" in text
    assert "o200" not in text


def extracted(step: int, at: float, **more) -> events.Extracted:
    fields = dict.fromkeys(
        ("by_range", "by_filter", "by_ratio", "moved", "deleted_rows", "garbage_bytes"), 0
    )
    fields |= {"chunks": 9, "extracted": 3, "closed": 1, "rows": 70, "read_bytes": 5000}
    fields |= {"written_bytes": 4000, "seconds": 0.5, "wait_s": 0.25} | more
    return events.Extracted(step=step, time=at, **fields)


def test_rounds_of_extraction_add_up_and_failed_ones_are_told() -> None:
    failed = events.ExtractionFailed(error="disk full", time=3)
    told = training.summarize([OPENED, durable(10, 1), extracted(10, 2), failed, extracted(20, 4)])
    assert told.extraction == training.Extraction(
        rounds=2, failed=1, chunks=18, extracted=8, rows=140, read_bytes=10_000,
        written_bytes=8000, seconds=0.5,
    )  # fmt: skip
    text = " ".join(shown(training.summary_table(told)).split())
    assert "2 rounds, 140 dead rows moved out of 8 chunks, 8.0 kB written" in text
    assert "1 round failed" in text
    assert told.to_dict()["extraction"]["rounds"] == 2


def test_without_a_grid_nothing_is_said_of_extraction() -> None:
    told = training.summarize(killed_and_resumed())
    assert told.extraction is None
    assert told.to_dict()["extraction"] is None
    assert "extraction" not in shown(training.summary_table(told))


def test_a_round_is_one_line() -> None:
    line = training.extraction_line(extracted(20, 1))
    assert line.startswith("extraction up to step 20: 4 of 9 chunks, 70 dead rows moved")
    assert "\n" not in line


def test_the_story_copes_with_rounds_of_extraction(tmp_path: Path) -> None:
    happened = killed_and_resumed()
    happened.insert(4, extracted(10, 2.75))
    happened.append(extracted(20, 8.0))
    happened.append(events.ExtractionFailed(error="disk full", time=9.75))
    kill = story.find_kill(happened, killed_at=3.25)
    assert kill == story.find_kill(killed_and_resumed(), killed_at=3.25)
    assert draw_timeline(happened, kill, tmp_path / "t.png")
