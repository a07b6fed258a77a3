"""recsys/data/vocabulary.py: ids that are stable, and thresholds that count right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import CorruptDataError, InvalidRequestError, NotFoundError
from holdfast.recsys.data.criteo import CriteoFiles, criteo_reader
from holdfast.recsys.data.reader import read_codes
from holdfast.recsys.data.vocabulary import HashedIds, Vocabulary, _Counts, build_vocabulary
from tests.unit.recsys.data.criteo_lines import make_samples, write

GOLDEN = [[943, 3], [608, 4], [153, 2]]


def test_hashed_ids_never_change_between_versions() -> None:
    codes = np.array([[0, 0], [1, 1], [0xFFFFFFFF + 1, 5]], dtype=np.uint64)
    assert HashedIds([1000, 7]).ids(codes).tolist() == GOLDEN


def test_hashed_ids_fill_every_table_evenly() -> None:
    rows = [10, 64, 997]
    codes = np.repeat(np.arange(50_000, dtype=np.uint64)[:, None], 3, axis=1)
    ids = HashedIds(rows).ids(codes)
    for table, size in enumerate(rows):
        counts = np.bincount(ids[:, table], minlength=size)
        assert len(counts) == size
        assert counts.min() > 0
        # chi-square with size - 1 degrees of freedom, 5 standard deviations
        chi_square = ((counts - 50_000 / size) ** 2 / (50_000 / size)).sum()
        assert chi_square < size + 5 * np.sqrt(2 * size)


@pytest.mark.parametrize("count_min", [1, 2, 4])
def test_a_vocabulary_keeps_what_is_frequent(tmp_path: Path, count_min: int) -> None:
    samples = make_samples(40)
    path = write(tmp_path / "log", [s.line for s in samples])
    source = CriteoFiles([path], block_bytes=500)
    vocabulary = build_vocabulary(read_codes(source), count_min=count_min)
    for feature in range(26):
        counts = Counter(s.codes[feature] for s in samples)
        kept = sorted(code for code, count in counts.items() if count >= count_min)
        assert vocabulary.codes[feature].tolist() == kept
        assert vocabulary.table_rows[feature] == len(kept) + 1
    ids = vocabulary.ids(np.array([s.codes for s in samples], dtype=np.uint64))
    for row, sample in zip(ids.tolist(), samples, strict=True):
        for feature, row_id in enumerate(row):
            kept = vocabulary.codes[feature].tolist()
            code = sample.codes[feature]
            assert row_id == (kept.index(code) + 1 if code in kept else 0)
    unseen = np.full((1, 26), 123456789, dtype=np.uint64)
    assert not vocabulary.ids(unseen).any()
    batches = list(criteo_reader([path], batch_size=40, ids=vocabulary))
    assert batches[0].ids.tolist() == ids.tolist()


def test_counts_are_the_same_however_they_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.recsys.data.vocabulary._MERGE_CODES", 3)
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 60, 500).astype(np.uint64)
    counts = _Counts()
    for piece in np.array_split(codes, 90):
        counts.add(piece)
    expected = sorted(c for c, n in Counter(codes.tolist()).items() if n >= 9)
    assert counts.at_least(9).tolist() == expected


def test_a_saved_vocabulary_loads_equal(tmp_path: Path) -> None:
    codes = np.array([[5, 1], [5, 2], [9, 3]], dtype=np.uint64)
    vocabulary = build_vocabulary([codes], count_min=2)
    vocabulary.save(tmp_path / "words.npz")
    loaded = Vocabulary.load(tmp_path / "words.npz")
    assert [kept.tolist() for kept in loaded.codes] == [[5], []]
    assert loaded.count_min == 2
    assert loaded.ids(codes).tolist() == vocabulary.ids(codes).tolist() == [[1, 0], [1, 0], [0, 0]]
    assert [path.name for path in tmp_path.iterdir()] == ["words.npz"]


def test_damaged_and_hostile_vocabularies_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "words.npz"
    with pytest.raises(NotFoundError):
        Vocabulary.load(path)
    sound = {
        "format": np.array([1, 1]),
        "lengths": np.array([2]),
        "codes": np.array([1, 2], dtype=np.uint64),
    }
    for change in (
        {"lengths": np.array([3])},
        {"lengths": np.array([-1, 3])},
        {"codes": np.array([2, 1], dtype=np.uint64)},
        {"codes": np.array([1.0, 2.0])},
        {"format": np.array([2, 1])},
        {"codes": np.array([object(), object()])},
    ):
        np.savez(path, **{**sound, **change})
        with pytest.raises(CorruptDataError):
            Vocabulary.load(path)
    np.savez(path, **sound)
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptDataError):
            Vocabulary.load(path)


def test_refuses_another_number_of_features() -> None:
    codes = np.zeros((2, 3), dtype=np.uint64)
    with pytest.raises(InvalidRequestError, match="features"):
        HashedIds([5, 5]).ids(codes)
    with pytest.raises(InvalidRequestError, match="features"):
        build_vocabulary([np.zeros((2, 2), dtype=np.uint64)]).ids(codes)
    with pytest.raises(InvalidRequestError):
        build_vocabulary([])
    with pytest.raises(InvalidRequestError):
        build_vocabulary([codes], count_min=0)
