"""A run of ranks, its tables cut by columns: every command shows whole tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.golden.make_format3 import BASE_STEP, CHANGED, DELTA_STEP, ROWS_OF, weights

STORE = Path(__file__).parents[2] / "golden" / "format3"


def test_inspect_and_verify_take_it(call) -> None:
    code, data, _ = call("inspect", STORE)
    assert code == 0
    assert [line["step"] for line in data["checkpoints"]] == [BASE_STEP, DELTA_STEP]
    assert {t["name"] for t in data["tables"]} == {"users", "items"}
    code, data, _ = call("verify", STORE)
    assert code == 0 and not data["damages"]


def test_restore_writes_whole_tables(call, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    code, _, _ = call("restore", STORE, "--step", DELTA_STEP, "--out", out)
    assert code == 0
    found = load_file(out)
    for table in ROWS_OF:
        assert np.array_equal(found[table], weights(table, DELTA_STEP))
    some = tmp_path / "rows.safetensors"
    code, _, _ = call(
        "restore", STORE, "--step", BASE_STEP, "--table", "users", "--rows", "2:5", "--out", some
    )
    assert code == 0
    assert np.array_equal(load_file(some)["users"], weights("users", BASE_STEP)[2:5])


def test_diff_counts_rows_once(call) -> None:
    code, data, _ = call("diff", STORE, BASE_STEP, DELTA_STEP)
    assert code == 0
    changed = {t["table"]: t["changed"] for t in data["tables"]}
    assert changed == dict.fromkeys(ROWS_OF, len(CHANGED))
