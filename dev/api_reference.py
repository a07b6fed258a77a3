"""Write docs/api.md: the public names with their signatures and docstrings.

    python -m dev.api_reference

Works on the source alone, so that the page is the same wherever it is made.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
SECTIONS = {
    "Training": ("Checkpointer", "PendingSave", "SaveStats", "attach", "Attachment",
                 "RestoreStats", "Stateful", "GrantedLoader"),
    "Reading a run": ("open", "Run", "CheckpointInfo", "Rows", "verify", "VerifyReport"),
    "Settings and rules": ("Settings", "Strategy", "Every", "Pls", "Keep", "Codec", "BitsFor",
                 "FailureEstimate", "Extract", "Priority", "Placement", "Shard"),
    "Other formats and storages": ("import_checkpoint", "Imported", "Storage"),
    "Errors": ("HoldfastError", "InvalidRequestError", "NotFoundError", "ConflictError",
               "UnavailableError", "CommitUnknownError", "CorruptDataError", "DataLossError",
               "SaveCancelledError", "HoldfastWarning"),
}  # fmt: skip
_HEAD = """# API

Everything that `import holdfast as hf` offers, made from the source by
`python -m dev.api_reference`. Names of earlier versions, which work with a warning, are left out.
[settings.md](settings.md) has the settings by use.
"""
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef)


def main() -> None:
    """Write the page."""
    PAGE.write_text(make_page())


def make_page() -> str:
    """The page as it should be."""
    homes = _homes()
    lines = [_HEAD]
    for title, names in SECTIONS.items():
        lines.append(f"- **{title}**: " + ", ".join(f"[{n}](#{n.lower()})" for n in names))
    for title, names in SECTIONS.items():
        lines.append(f"\n## {title}")
        for name in names:
            lines += ["", f"### {name}", "", *_describe(_find(homes[name], name))]
    return "\n".join(lines) + "\n"


def _homes() -> dict[str, Path]:
    """The module of each public name, as src/holdfast/__init__.py has it."""
    tree = ast.parse((ROOT / "src/holdfast/__init__.py").read_text())
    found = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES"
    )
    return {
        name: ROOT / "src/holdfast" / f"{home.replace('.', '/')}.py"
        for home, names in ast.literal_eval(found).items()
        for name in names
    }


def _find(path: Path, name: str) -> ast.ClassDef | ast.FunctionDef:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, _DEFINITIONS) and node.name == name:
            return node
    raise LookupError(f"{name} is not defined in {path}")


def _describe(node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        yield from (*_code(f"hf.{_signature(node)}"), "", *_text(node))
        return
    yield from _text(node)
    made = next((m for m in _members(node) if m.name == "__init__"), None)
    if made is not None and not (ast.get_docstring(made) or "").startswith("Made by"):
        yield from ("", *_code(f"hf.{_signature(made, name=node.name)}"), "", *_text(made))
    fields = list(_fields(node))
    if fields:
        yield from ("", "| field | type | default | |", "|---|---|---|---|", *fields)
    for member in _members(node):
        if member.name.startswith("_") or _is_deprecated(member):
            continue
        is_property = any(ast.unparse(d) == "property" for d in member.decorator_list)
        shown = f"{member.name}: {_type(member.returns)}" if is_property else _signature(member)
        yield from ("", *_code(shown), "", *_text(member))


def _members(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [member for member in node.body if isinstance(member, ast.FunctionDef)]


def _is_deprecated(node: ast.FunctionDef) -> bool:
    return (ast.get_docstring(node) or "").startswith("Deprecated")


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """A line for each field of a dataclass, with the docstring under it."""
    for at, field in enumerate(node.body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        after = node.body[at + 1] if at + 1 < len(node.body) else None
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = " ".join(str(after.value.value).split())
        if text.startswith("Deprecated") or "ClassVar" in ast.unparse(field.annotation):
            continue
        default = "" if field.value is None else f"`{_cell(ast.unparse(field.value))}`"
        kind = _cell(ast.unparse(field.annotation))
        yield f"| `{field.target.id}` | `{kind}` | {default} | {_plain(_cell(text))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _signature(node: ast.FunctionDef, *, name: str | None = None) -> str:
    """A call as a user writes it: without self, broken where it is long."""
    arguments = node.args
    given = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(given) - len(arguments.defaults)) + list(arguments.defaults)
    shown = [_argument(a, d) for a, d in zip(given, defaults, strict=True) if a.arg != "self"]
    if arguments.vararg is not None:
        shown.append("*" + _argument(arguments.vararg, None))
    elif arguments.kwonlyargs:
        shown.append("*")
    shown += [_argument(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults,
                                              strict=True)]  # fmt: skip
    if arguments.kwarg is not None:
        shown.append("**" + _argument(arguments.kwarg, None))
    returns = "" if name is not None else f" -> {_type(node.returns)}"
    line = f"{name or node.name}({', '.join(shown)}){returns}"
    if len(line) <= 96:
        return line
    return f"{name or node.name}(\n    " + ",\n    ".join(shown) + f",\n){returns}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg
    if argument.annotation is not None:
        text += f": {ast.unparse(argument.annotation)}"
    return text if default is None else f"{text} = {ast.unparse(default)}"


def _type(node: ast.expr | None) -> str:
    return "None" if node is None else ast.unparse(node)


def _code(text: str) -> list[str]:
    return ["```python", text, "```"]


def _plain(text: str) -> str:
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def _text(node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    """A docstring as Markdown: paragraphs, examples, and what is raised as a list."""
    blocks = (ast.get_docstring(node) or "").split("\n\n")
    for index, block in enumerate(blocks):
        if index:
            yield ""
        if block.startswith("Raises:"):
            yield from _raised(block)
        elif block.lstrip().startswith(">>>") or block.startswith("    "):
            yield from _code(textwrap.dedent(block))
        else:
            yield _plain(" ".join(block.split()))


def _raised(block: str) -> Iterator[str]:
    found: list[str] = []
    for line in block.splitlines()[1:]:
        if re.match(r" {4}\w+: ", line):
            name, _, text = line.strip().partition(": ")
            found.append(f"- Raises `{name}`: {text}")
        else:
            found[-1] += f" {line.strip()}"
    yield from map(_plain, found)


if __name__ == "__main__":
    main()
