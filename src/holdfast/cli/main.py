"""The ``holdfast`` command: its subcommands, and the edge where errors become one message.

Exit codes: 0 done; 1 it failed, or verification found damage; 2 the command was written wrongly;
130 interrupted.

Invariant: an error a user can meet ends as one message on stderr (and one JSON object on stdout
with ``--json``), never as a traceback; a bug of ours keeps its traceback.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import typer

import holdfast
from holdfast.cli.changing.delete import delete
from holdfast.cli.commands.calibrate import calibrate
from holdfast.cli.commands.compare import compare
from holdfast.cli.commands.demo import demo
from holdfast.cli.commands.diff import diff
from holdfast.cli.commands.emulate import emulate
from holdfast.cli.commands.import_ import import_
from holdfast.cli.commands.inspect import inspect
from holdfast.cli.commands.plan import plan
from holdfast.cli.commands.restore import restore
from holdfast.cli.commands.train import train
from holdfast.cli.commands.verify import verify
from holdfast.cli.output import print_json
from holdfast.cli.warmup import warmup
from holdfast.errors import HoldfastError
from holdfast.visible import visible

app = typer.Typer(
    name="holdfast",
    help="Fault-tolerant training for recommendation models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    demo, train, compare, inspect, diff, verify, restore, delete, plan, emulate, calibrate, warmup
):  # fmt: skip
    app.command()(command)
app.command("import")(import_)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"holdfast {holdfast.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Fault-tolerant training for recommendation models."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line; its exit code."""
    is_json = "--json" in arguments
    try:
        code = app(args=list(arguments), prog_name="holdfast", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except HoldfastError as error:
        facts = {name: _plain(value) for name, value in error.facts.items()}
        return _fail(type(error).__name__, str(error), 1, is_json, facts=facts, todo=error.todo)
    except KeyboardInterrupt:
        return _fail("Interrupted", "interrupted", 130, is_json)
    except BrokenPipeError:
        # whoever read our output has seen enough; Python would complain when closing stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(type(error).__name__, _os_message(error), 1, is_json)
    except Exception as error:
        usage = getattr(error, "format_message", None)
        if usage is None:  # not typer's: a bug
            raise
        if not usage():  # the help was shown instead
            return 2
        message = _uncapitalized(usage()).removesuffix(".")
        return _fail("UsageError", f"{message}; {_hint(error)}", 2, is_json)


def _fail(kind: str, message: str, code: int, is_json: bool, **more: Any) -> int:
    print(f"holdfast: {visible(message)}", file=sys.stderr)
    if is_json:
        print_json({"error": {"type": kind, "message": message, **more}, "exit_code": code})
    return code


def _os_message(error: OSError) -> str:
    """What the system refused, and where.

    >>> _os_message(PermissionError(13, "Permission denied", "/root/x"))
    "permission denied. file='/root/x'"
    """
    reason = _uncapitalized(error.strerror or str(error))
    return f"{reason}. file={error.filename!r}" if error.filename is not None else reason


def _uncapitalized(text: str) -> str:
    return text[:1].lower() + text[1:]


def _hint(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return f"try '{context.command_path if context else 'holdfast'} --help'"


def _plain(value: object) -> object:
    """A fact as JSON can hold it."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def main() -> None:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):
        # Whatever the locale: a character that it lacks is shown as its escape.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    code = run(sys.argv[1:])
    if "pyarrow.flight" in sys.modules:
        _end(code)
    sys.exit(code)


def _end(code: int) -> NoReturn:
    """End without taking the interpreter apart: a thread of the data plane that comes back from its
    library meanwhile would abort the process. What is registered for the exit is done."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
