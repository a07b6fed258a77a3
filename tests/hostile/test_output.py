"""Names and reasons of a run, of a file, of a peer and of the command line: shown, never acted on.

Every string that a catalog holds is replaced by one that a terminal, markup, JSON, a picture or an
encoding would trip over; its checksum is made right. Every command that reads a run then ends by
itself or by an error of ours; what it prints can be shown anywhere, and its JSON parses.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import holdfast as hf
from holdfast import events
from holdfast.checkpoint.format.checksum import as_hex, checksum
from holdfast.cli.main import app, run
from holdfast.cli.output import described, stderr
from holdfast.cli.progress import TrainingBar
from holdfast.metrics import Metrics, TensorBoard
from holdfast.report.cluster import live as clusterlive
from tests.golden.make_format2 import STEPS
from tests.unit.metrics.exposition import parse

GRID = Path(__file__).parent.parent / "golden" / "format2"  # a grid, and what extraction made of it
FIRST, LAST = STEPS[0], STEPS[-1]
STRINGS = {
    "closing-tag": "[/red]",
    "opening-tag": "[bold]x",
    "link-tag": "[link=http://x]x[/link]",
    "emoji-code": ":boom:",
    "clear-screen": "\x1b[2J\x1b]0;x\x07",
    "c1-control": "\x9b2J\x85",
    "delete": "a\x7f\x08\x08b",
    "bidi": "a\u202eb\u2066c",
    "zero-width": "a\u200bb\ufeff\u2028",
    "high-surrogate": "a\ud800",
    "low-surrogate": "\udc9bb",
    "null": "a\x00b",
    "carriage-return": "sound\rdamaged",
    "new-line": "a\nholdfast: all is well",
    "tab": "a\tb",
    "long": "x" * 10_000,
    "long-and-odd": "\x1b[" * 5_000,
    "script": "</script><script>alert(1)</script>",
    "entities": "&amp;&#x1b;<!-- -->]]>",
    "quotes": '\'"`\\"',
    "braces": "{} {0} {task.total} {x!r}",
    "percent": "%s %n %(x)s",
    "dollars": r"$\frac{$ \input{/etc/passwd} $x^2$",
    "astral": "\U0001f600\U000e0041",
    "empty": "",
}


def replace_everywhere(body: Any, old: str, new: str) -> Any:
    if isinstance(body, list):
        return [replace_everywhere(item, old, new) for item in body]
    return new if body == old else body


def in_checkpoints(at: int) -> Callable[[dict[str, Any], str], None]:
    def change(body: dict[str, Any], text: str) -> None:
        for entry in body["checkpoints"]:
            entry[at] = text

    return change


def rename(old: str) -> Callable[[dict[str, Any], str], None]:
    def change(body: dict[str, Any], text: str) -> None:
        for part in ("schemas", "tables"):
            body[part] = replace_everywhere(body[part], old, text)

    return change


def put(name: str) -> Callable[[dict[str, Any], str], None]:
    return lambda body, text: body.update({name: text})


def objects(body: dict[str, Any], text: str) -> None:
    body["objects"][0][0] = text


def dtype(body: dict[str, Any], text: str) -> None:
    body["schemas"][0][0][2][0][2:] = [text]


# Where a catalog has a string of its own choice.
FIELDS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "table": rename("exact"),
    "column": rename("sum"),
    "kind": in_checkpoints(2),
    "codec": in_checkpoints(6),
    "state codec": in_checkpoints(7),
    "reason": in_checkpoints(13),
    "run": put("run"),
    "writer": put("writer"),
    "object": objects,
    "dtype": dtype,
}


SHOWN = ("table", "column", "codec", "reason")


def lie(store: Path, *changes: tuple[str, str]) -> None:
    """Put strings into fields of the newest catalog, its checksum right."""
    path = max((store / "catalog").iterdir())
    head, text = path.read_bytes().split(b"\n")[:2]
    body = json.loads(text)
    for field, string in changes:
        FIELDS[field](body, string)
    changed = json.dumps(body, separators=(",", ":")).encode()
    line = b" ".join([*head.split(b" ")[:2], as_hex(checksum(changed)).encode()])
    path.write_bytes(line + b"\n" + changed + b"\n")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    shutil.copytree(GRID, tmp_path / "run")
    return tmp_path / "run"


def commands(store: Path, table: str) -> Iterator[list[str]]:
    """Every command that reads a run, but for exports of models."""
    url, out = str(store), store.parent
    yield ["inspect", url]
    yield ["inspect", url, "--all", "--step", str(LAST)]
    yield ["inspect", url, "--grid"]
    yield ["inspect", url, "--grid", "--step", str(LAST), "--table", table]
    yield ["diff", url, str(FIRST), str(LAST)]
    yield ["diff", url, str(FIRST), str(LAST), "--table", table]
    yield ["verify", url]
    yield ["restore", url, "--out", str(out / "w.safetensors"), "--force"]
    one = ["--table", table, "--rows", "0:3", "--with-state", "--force"]
    yield ["restore", url, "--out", str(out / "rows.safetensors"), *one]
    yield ["restore", url, "--out", str(out / "w.safetensors"), "--step", "4", "--force"]


def exports(store: Path) -> Iterator[list[str]]:
    """A model and its optimizer, for other programs."""
    for kind in ("torch", "dcp"):
        out = str(store.parent / kind)
        yield ["restore", str(store), "--out", out, "--format", kind, "--force"]


# What a terminal's own program may send: colours, the cursor, the bar that is drawn again.
OWN = re.compile(r"\x1b\[[0-9;?]*[mKAhlGJ]|\r")
UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def check_shown(text: str, *, is_terminal: bool = False) -> None:
    """Nothing in it does anything but stand there."""
    plain = OWN.sub("", text) if is_terminal else text
    odd = {c for c in set(plain) - {"\n"} if unicodedata.category(c) in UNSEEN}
    assert not odd, [hex(ord(c)) for c in odd]
    text.encode("utf-8")


def check_json(out: str) -> Any:
    """Exactly one value, that every parser takes."""
    assert out.isascii()
    check_shown(out)

    def refuse(number: str) -> None:
        raise AssertionError(number)

    value = json.loads(out, parse_constant=refuse)
    json.dumps(value, ensure_ascii=False).encode("utf-8")  # no half of a surrogate pair
    return value


def call(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    between: Callable[[], object] = lambda: None,
) -> None:
    """A command in both of its modes; an exception that leaves it is none of ours."""
    capsys.readouterr()
    code = run(arguments)
    out, err = capsys.readouterr()
    assert code in (0, 1, 2)
    check_shown(out)
    check_shown(err)
    assert "Traceback" not in err
    between()
    again = run([*arguments, "--json"])
    out, err = capsys.readouterr()
    check_shown(err)
    value = check_json(out)
    assert again == code
    if code == 2 or "error" in value:
        assert {"type", "message"} <= set(value["error"])


@pytest.mark.parametrize(
    ("field", "string"),
    [
        (field, string)
        for number, field in enumerate(FIELDS)
        for at, string in enumerate(STRINGS)
        if field in SHOWN or (at + number) % 6 == 0
    ],
)
def test_whatever_a_catalog_says_is_shown_and_not_acted_on(
    field: str, string: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = STRINGS[string]
    lie(store, (field, text))
    every = list(commands(store, text if field == "table" else "exact"))
    for arguments in every if field == "table" else every[::3]:
        call(arguments, capsys)


def save_named(url: Path, name: str) -> None:
    """A run of a real model that has a table and a network of this name."""
    model = nn.Module()
    model.add_module(name, nn.Embedding(6, 3, sparse=True))
    model.add_module(f"{name}-network", nn.Linear(3, 1))
    optimizer = torch.optim.Adagrad(model.parameters())
    with hf.Checkpointer(url, model=model, optimizer=optimizer, every=1) as ck:
        for _ in range(2):
            table, network = model.children()
            network(table(torch.tensor([1, 4]))).sum().backward()
            optimizer.step()
            ck.step()


@pytest.mark.parametrize("string", [name for name in STRINGS if name != "empty"])
def test_a_model_with_odd_names_is_saved_and_shown_or_refused_by_an_error_of_ours(
    string: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, name = tmp_path / "run", STRINGS[string].replace(".", ",")  # torch takes no dot
    with contextlib.suppress(hf.HoldfastError):
        save_named(url, name)
    for arguments in (
        ["inspect", str(url)],
        ["diff", str(url), "1", "2"],
        *exports(url),
    ):
        call(arguments, capsys)


@pytest.mark.parametrize("string", STRINGS)
def test_names_reach_json_as_they_are(string: str, store: Path) -> None:
    """An escape is for people; a program gets the name itself, if it is text at all."""
    text = STRINGS[string]
    lie(store, *((field, text) for field in ("table", "column", "codec", "reason", "run")))
    done = CliRunner().invoke(app, ["inspect", str(store), "--json"])
    if done.exit_code:  # a reader may refuse such names
        assert isinstance(done.exception, hf.HoldfastError)
        return
    seen = check_json(done.stdout)
    is_text = not any("\ud800" <= c <= "\udfff" for c in text)
    found = [seen["run"], seen["tables"][0]["name"], seen["tables"][0]["columns"][1]["name"],
             seen["checkpoints"][0]["codec"], seen["checkpoints"][0]["reason"]]  # fmt: skip
    assert all(name == text for name in found) if is_text else text not in found


@pytest.mark.parametrize("string", STRINGS)
def test_commands_called_by_typer_end_by_themselves_or_by_an_error_of_ours(
    string: str, store: Path
) -> None:
    text = STRINGS[string]
    lie(store, *((field, text) for field in ("table", "column", "codec", "reason", "run")))
    for arguments in list(commands(store, text))[::2]:
        for more in ([], ["--json"]):
            done = CliRunner().invoke(app, [*arguments, *more])
            if done.exception is not None:
                assert isinstance(done.exception, hf.HoldfastError | SystemExit), done.exception
            check_shown(done.stdout)
            check_shown(done.stderr)
            check_shown(str(done.exception))


@pytest.mark.parametrize("kind", ["svg", "png"])
@pytest.mark.parametrize("string", STRINGS)
@pytest.mark.filterwarnings("ignore:Glyph .* missing from")
def test_pictures_hold_names_as_text(
    string: str, kind: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = STRINGS[string]
    lie(store, ("table", text), ("reason", text))
    picture = store.parent / f"grid.{kind}"
    call(["inspect", str(store), "--grid", "--table", text, f"--{kind}", str(picture)], capsys)
    if kind == "svg" and picture.exists():
        ElementTree.fromstring(picture.read_text())
        check_shown(picture.read_text())
        assert "<script" not in picture.read_text()


@pytest.mark.parametrize("string", [name for name in STRINGS if name != "null"])
def test_whatever_the_command_line_says_is_shown_and_not_acted_on(
    string: str, store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(store.parent)
    text = STRINGS[string]
    for arguments in (
        ["inspect", text],
        ["inspect", str(store), f"--x{text}"],
        ["inspect", str(store), "--step", text],
        ["inspect", str(store), "--grid", "--table", text],
        ["diff", str(store), text, "3"],
        ["verify", f"x{text}"],
        ["verify", f"{text}://x"],
        ["verify", str(store), "--storage-options", text],
        ["restore", str(store), "--out", f"x{text}/y"],
        ["restore", str(store), "--out", "w.st", "--table", text, "--force"],
        ["restore", str(store), "--out", "w.st", "--table", "exact", "--rows", text, "--force"],
        ["restore", str(store), "--out", "w.st", "--format", text, "--force"],
        ["import", f"x{text}.pt", "new"],
        ["plan", "--situation", text],
        ["calibrate", text],
        [text or "''"],
    ):
        call(arguments, capsys)


@pytest.mark.parametrize("string", [name for name in STRINGS if name not in ("empty", "null")])
def test_whatever_an_imported_file_says_is_shown_and_not_acted_on(
    string: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = STRINGS[string]
    name = f"{text[:40].replace('/', '|')}.pt"  # also a bar of progress has it
    try:
        torch.save({text: torch.zeros(4, 3), "other": torch.ones(5)}, name)
    except (RuntimeError, UnicodeEncodeError, ValueError):  # no name of a file
        name = "plain.pt"
        torch.save({text: torch.zeros(4, 3), "other": torch.ones(5)}, name)
    for table in (text, "*", "nothing"):
        made = tmp_path / "run"
        forget = functools.partial(shutil.rmtree, made, ignore_errors=True)
        call(["import", name, "run", "--table", table], capsys, between=forget)
        if made.exists():
            call(["inspect", "run"], capsys)
            call(["verify", "run"], capsys)
            forget()


# All that a catalog may say: half of a surrogate pair is refused.
EVERYTHING = re.sub("[\ud800-\udfff]", "", "".join(STRINGS.values()))[:3000]
SOME = (0, 3, 4, 6)  # of the commands: one of each


def environment() -> dict[str, str]:
    """No locale at all, and nothing that says how to encode."""
    named = ("PYTHONIOENCODING", "PYTHONUTF8", "LC_ALL", "LC_CTYPE", "LANG", "NO_COLOR", "COLUMNS")
    kept = {name: value for name, value in os.environ.items() if name not in named}
    return {**kept, "LANG": "C", "TERM": "xterm-256color"}


@pytest.mark.parametrize("field", ["table", "reason"])
def test_a_process_without_a_locale_shows_everything(field: str, store: Path) -> None:
    for text in (EVERYTHING, "a\ud800"):
        shutil.rmtree(store)
        shutil.copytree(GRID, store)
        lie(store, (field, text))
        every = list(commands(store, "exact"))
        for at in SOME if text == EVERYTHING else SOME[:1]:
            for more in ([], ["--json"]):
                done = subprocess.run(
                    [sys.executable, "-m", "holdfast.cli.main", *every[at], *more],
                    capture_output=True,
                    env=environment(),
                    timeout=120,
                )
                assert b"Traceback" not in done.stderr, done.stderr
                assert done.returncode in (0, 1)
                check_shown(done.stdout.decode("utf-8"))
                check_shown(done.stderr.decode("utf-8"))
                if more:
                    check_json(done.stdout.decode("utf-8"))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_lacks_characters_gets_their_escapes(encoding: str, store: Path) -> None:
    lie(store, ("table", EVERYTHING))
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "inspect", str(store)],
        capture_output=True,
        env={**environment(), "PYTHONIOENCODING": encoding},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    check_shown(done.stdout.decode(encoding))


def test_a_terminal_is_sent_nothing_but_the_program_s_own_colours(store: Path) -> None:
    lie(store, *((field, EVERYTHING) for field in ("table", "column", "codec", "reason")))
    for arguments in (["inspect", str(store)], ["verify", str(store)], ["inspect", "\x1b[2J"]):
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli.main", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(),
        ) as child:
            os.close(theirs)
            sent = b""
            while True:
                try:
                    data = os.read(ours, 1 << 16)
                except OSError:  # Linux: the other end is closed
                    break
                if not data:
                    break
                sent += data
            os.close(ours)
        assert child.returncode in (0, 1)
        check_shown(sent.decode("utf-8"), is_terminal=True)


# What peers and errors say.


@pytest.mark.parametrize("string", STRINGS)
def test_errors_are_one_line_that_can_be_shown(string: str) -> None:
    text = STRINGS[string]

    class Odd:
        def __repr__(self) -> str:
            return text

    for error in (
        hf.HoldfastError(text),
        hf.NotFoundError("no such table", table=text, todo=text),
        hf.CorruptDataError("odd", what=Odd(), found=[text, {text: text}]),
        hf.UnavailableError(f"cannot read: {text}", cause=OSError(5, text)),
    ):
        check_shown(str(error))
        assert "\n" not in str(error)
        assert text in (error.facts.get("table", text), text)


@pytest.mark.parametrize("string", STRINGS)
def test_lines_about_events_are_shown_and_not_acted_on(
    string: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = STRINGS[string]
    console = stderr()
    bar = TrainingBar(console, None, 10)
    for event in (
        events.SaveFailed(step=1, error=text),
        events.ExtractionFailed(error=text),
        events.CodecChosen(codec=text, state_codec=text, reason=text),
        events.ServerLost(server=1, pid=2, how=text),
        events.WorkerLost(worker=1, pid=2, how=f"died\n{text}", batches=()),
        events.WorkerLost(worker=1, pid=2, how=text, batches=()),
    ):
        bar(event)
        line = clusterlive.line(event)
        if line is not None:
            bar.say(line)
        console.print(text, [text], soft_wrap=True)
    check_shown(capsys.readouterr().err)
    check_shown(described(text))


@pytest.mark.parametrize("string", STRINGS)
def test_labels_of_metrics_are_what_their_readers_take(string: str, tmp_path: Path) -> None:
    text = STRINGS[string]
    metrics = Metrics()
    with TensorBoard(tmp_path) as board:
        for sink in (metrics, board):
            sink(events.CheckpointsDropped(steps=(1, 2), reason=text, time=1.0))
    check_shown(metrics.text())
    assert parse(metrics.text())
