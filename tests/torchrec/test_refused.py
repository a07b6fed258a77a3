"""What is not supported is refused when the Checkpointer is made, with the reason."""

from __future__ import annotations

from tests.torchrec.pool import Pool


def test_tables_that_cannot_be_saved_are_refused_with_the_reason(pool: Pool) -> None:
    """Integers, rows in a cache, optimizers with unknown row state, two cuts in one parameter."""
    (said,) = pool.run("refusals", ranks=1)
    assert set(said) == {"int8", "cached", "optimizer", "two dense cuts"}
    assert "INT8" in said["int8"] and "bags.embedding_bags.t.weight" in said["int8"]
    assert "fused_uvm_caching" in said["cached"]
    assert "ema" in said["optimizer"] and "row state is not known" in said["optimizer"]
    assert "parameter" in said["two dense cuts"]
