"""Characters of a drawing: columns stay in place, numbers appear where all fit, dots tell gaps."""

from __future__ import annotations

import pytest

from holdfast.report.canvas import SHADES, Canvas, Mark, make_scale, short

NUMBERS = (1, 999, 12_345, 999_600, 10**17)


def make(cell_width: int, *, edge: tuple[int, int] = (0, 0)) -> Canvas:
    """Two full lines, and one with a dot and then nothing."""
    scale = make_scale(NUMBERS)
    marks: dict[tuple[int, int], Mark | None] = {
        (line, column): Mark(number, scale.shade(number), False)
        for line in (0, 1)
        for column, number in enumerate(NUMBERS)
    }
    marks[2, 0] = None
    labels = tuple(str(10 * (at + 1)) for at in range(len(NUMBERS)))
    return Canvas(labels, ("alive", "30", "20"), marks, *edge, cell_width, label_width=5)


@pytest.mark.parametrize("cell_width", range(1, 10))
@pytest.mark.parametrize("edge", [(0, 0), (1, 1), (2, 3), (3, 5)])
def test_columns_end_at_the_same_character_in_every_line(
    cell_width: int, edge: tuple[int, int]
) -> None:
    canvas = make(cell_width, edge=edge)
    # The label and a blank, the cells, and the edge once it has been passed.
    ends = [6 + cell_width * (at + 1) + (0 < edge[1] <= at) for at in range(len(NUMBERS))]
    for line in (0, 1):
        assert all(canvas.line(line).plain[end - 1] in SHADES for end in ends)
    assert canvas.line(2).plain[ends[0] - 1] == "·"
    assert len(canvas.line(2)) == len(canvas.line(0))


@pytest.mark.parametrize("cell_width", range(1, 10))
def test_numbers_are_shown_where_every_number_fits(cell_width: int) -> None:
    text = make(cell_width).line(0).plain
    shown = [word.strip(SHADES) for word in text.split()[1:]]
    if cell_width >= 6:
        assert shown == [short(number) for number in NUMBERS]
    else:
        assert set("".join(shown)) == set()


def test_the_edge_surrounds_the_upper_left_corner() -> None:
    canvas = make(6, edge=(2, 3))
    corner = canvas.bottom().plain.index("┘")
    assert [canvas.line(at).plain[corner] for at in range(3)] == ["│", "│", " "]
    assert canvas.bottom().plain[6:corner] == "─" * 18


def test_without_an_edge_no_line_has_one() -> None:
    canvas = make(6)
    assert not any("│" in canvas.line(at).plain for at in range(3))


@pytest.mark.parametrize("cell_width", range(1, 10))
def test_labels_of_the_axis_never_run_into_each_other(cell_width: int) -> None:
    canvas = make(cell_width, edge=(1, 2))
    labels = canvas.axis().plain.split()
    assert labels[0] == canvas.columns[0]
    assert set(labels) <= set(canvas.columns)
    if cell_width >= 3:
        assert labels == list(canvas.columns)
