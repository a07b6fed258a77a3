"""The code that docs/cpr.md shows for a loop of one's own, run as it stands there."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.plan.calibration import Target
from holdfast.recsys.data.batch import Batch
from holdfast.recsys.data.clicks import ClickStream
from holdfast.recsys.models.presets import make_model, scaled_rows
from holdfast.recsys.train import evaluate

PAGE = Path(__file__).parents[3] / "docs" / "cpr.md"
ROWS = scaled_rows([40, 300, 90], total_rows=300)
STEPS = 48  # of the 400 that the page trains


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Fastest for a model this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def shown_code() -> str:
    """The indented lines under the sentence that introduces them."""
    _, after = PAGE.read_text(encoding="utf-8").split("For a model and a loop of your own", 1)
    lines = itertools.dropwhile(lambda line: not line.startswith("    "), after.splitlines())
    block = itertools.takewhile(lambda line: not line or line.startswith("    "), lines)
    return textwrap.dedent("\n".join(block))


def build(seed: int) -> tuple[Any, Any, Iterator[Batch]]:
    torch.manual_seed(seed)
    model = make_model("tiny", ROWS)
    stream = ClickStream(ROWS, batch_size=32)
    batches = (stream[index] for index in itertools.count())
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batches


def learn(model: Any, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
    optimizer.step()


def auc(model: Any) -> float:
    heldout = ClickStream(ROWS, batch_size=1024).heldout(2)
    found = evaluate(model, (heldout[index] for index in range(2)))
    assert found is not None
    return found


def test_the_page_calibrates_a_loop_of_ones_own() -> None:
    known: dict[str, Any] = {"build": build, "learn": learn, "auc": auc}
    exec(shown_code().replace("steps=400", f"steps={STEPS}"), known)
    assert len(known["pls"]) == 6
    assert all(0 < lost < 1 for lost in known["pls"])
    assert any(known["losses"])  # failures changed the model
    assert isinstance(known["target"], Target)
    assert 0 < known["target"].pls <= 1
    assert known["train"](1, failures=0) == (auc_of_plain_run(1), 0.0)


def auc_of_plain_run(seed: int) -> float:
    model, optimizer, batches = build(seed)
    for batch in itertools.islice(batches, STEPS):
        learn(model, optimizer, batch)
    return auc(model)
