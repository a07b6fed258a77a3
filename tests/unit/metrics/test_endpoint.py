"""The endpoint answers Prometheus over HTTP, and survives whoever else comes."""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

import holdfast as hf
from holdfast import events
from holdfast.metrics import Metrics, endpoint, serve
from tests.conftest import TinyModel, make_optimizers, train_steps
from tests.unit.metrics.exposition import parse

ESTABLISHED = 1  # of Linux's TCP states


@pytest.fixture
def served() -> Iterator[tuple[Metrics, str]]:
    metrics = Metrics()
    with serve(metrics, port=0) as url:
        yield metrics, url


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return answer.read().decode()  # type: ignore[no-any-return]


def talk(url: str, data: bytes, *, answers_first: bool = False) -> bytes:
    """Send bytes as they are; all that comes back.

    A server that has read enough answers and closes. What it left unread makes the system reset
    the connection, at any moment from then on: while this side sends, when it says that it has sent
    all (an OSError, but no ConnectionError), or when it reads on after the answer. The answer was
    sent before and can be read in all cases. ``answers_first``: say it after the reset for sure.
    """
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=10) as line:
        received = b""
        with contextlib.suppress(OSError):
            line.sendall(data)
            if answers_first:
                received += line.recv(65536)
                while line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED:
                    time.sleep(0.001)
            line.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while part := line.recv(65536):
                received += part
        return received


def test_training_is_scraped_while_it_runs(served: tuple[Metrics, str], tmp_path: Path) -> None:
    metrics, url = served
    model = TinyModel()
    optimizers = make_optimizers(model, "adagrad")
    log = events.EventLog([metrics, events.json_lines(tmp_path / "events.jsonl")])
    with hf.Checkpointer(
        tmp_path / "run", model=model, optimizer=optimizers, every=2, events=log, servers=2,
        total_steps=10,
    ) as ck:  # fmt: skip
        train_steps(model, optimizers, range(4), after=ck.step)
        ck.wait()
        found = parse(scrape(url))
        steps = found["holdfast_checkpoint_last_step"].samples
        assert list(steps.values()) == [4]
        train_steps(model, optimizers, range(4, 5), after=ck.step)
        ck.recover([1])
        pls = parse(scrape(url))["holdfast_pls"].samples
        assert list(pls.values()) == [ck.pls]
    durable = [
        e for e in events.read_events(tmp_path / "events.jsonl")
        if isinstance(e, events.SaveDurable)
    ]  # fmt: skip
    assert metrics.value("holdfast_checkpoint_bytes_total") == sum(e.bytes for e in durable) > 0
    assert metrics.value("holdfast_checkpoint_rows_total") == sum(e.rows for e in durable)
    assert torch.isfinite(model.users.weight).all()


def test_only_this_machine_reaches_it_unless_told(served: tuple[Metrics, str]) -> None:
    assert urlsplit(served[1]).hostname == "127.0.0.1"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "X"])
def test_other_methods_are_refused(served: tuple[Metrics, str], method: str) -> None:
    head = f"{method} /metrics HTTP/1.1\r\nContent-Length: 100000\r\n\r\n"
    answer = talk(served[1], head.encode() + b"x" * 100_000)
    assert answer.startswith(b"HTTP/1.0 501 ")
    parse(scrape(served[1]))


def test_head_has_no_body(served: tuple[Metrics, str]) -> None:
    request = urllib.request.Request(served[1], method="HEAD")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert (answer.status, answer.read()) == (200, b"")
        assert int(answer.headers["Content-Length"]) > 0


@pytest.mark.parametrize("path", ["/", "/metrics/", "/../etc/passwd", "/metrics%00"])
def test_there_is_nothing_elsewhere(served: tuple[Metrics, str], path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        scrape(served[1].removesuffix("/metrics") + path)
    assert caught.value.code == 404
    caught.value.close()


@pytest.mark.parametrize("data", [
    b"", b"\r\n\r\n", b"\x00" * 1000, b"GET\r\n\r\n", b"GET /metrics HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
], ids=range(9))  # fmt: skip
def test_hostile_requests_do_no_harm(served: tuple[Metrics, str], data: bytes) -> None:
    answer = talk(served[1], data)
    assert b"holdfast_checkpoints" not in answer
    parse(scrape(served[1]))


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="asks Linux for a connection's state")
def test_an_answer_is_read_also_after_the_connection_was_reset(
    served: tuple[Metrics, str],
) -> None:
    data = b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n"
    assert talk(served[1], data, answers_first=True).startswith(b"HTTP/1.0 431 ")
    parse(scrape(served[1]))


def test_silent_clients_leave_room_again(
    served: tuple[Metrics, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint._Handler, "timeout", 0.2)
    parts = urlsplit(served[1])
    lines = [socket.create_connection((parts.hostname, parts.port)) for _ in range(20)]
    for line in lines:
        line.settimeout(10)
        with contextlib.suppress(ConnectionError):
            assert line.recv(100) == b""  # closed from the other side, served or not
        line.close()
    monkeypatch.undo()  # on a busy machine a client may be silent for longer
    parse(scrape(served[1]))


def test_slow_clients_leave_room_again(
    served: tuple[Metrics, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "TOTAL_S", 0.3)
    parts = urlsplit(served[1])
    lines = [socket.create_connection((parts.hostname, parts.port)) for _ in range(8)]
    until = time.monotonic() + 20
    while lines:  # never silent, and never done
        assert time.monotonic() < until
        for line in list(lines):
            try:
                line.sendall(b"x")
            except OSError:
                line.close()
                lines.remove(line)
        time.sleep(0.02)
    monkeypatch.undo()
    parse(scrape(served[1]))


def test_port_that_is_taken_is_named(served: tuple[Metrics, str]) -> None:
    port = urlsplit(served[1]).port
    assert port is not None
    with (
        pytest.raises(hf.UnavailableError, match=f"port={port}"),
        serve(Metrics(), port=port),
    ):
        pass


def test_nothing_listens_afterwards() -> None:
    with serve(Metrics(), port=0) as url:
        scrape(url)
    with pytest.raises(OSError):
        scrape(url)
