"""The layout of folders is the architecture: imports point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

ROOT = Path(holdfast.__file__).parent

# What each part may import of Holdfast: a part is a module at the top, a folder, or a folder of
# checkpoint/. Parts stand in the order of the flow; each imports only from above its own line.
MODEL = {"errors", "events", "kernels", "visible"}
FORMAT = {"errors", "kernels", "model", "storage"}
STORE = {*FORMAT, "checkpoint/format", "checkpoint/planning", "events"}
ALLOWED = {
    "visible": set(),
    "errors": {"visible"},
    "deprecation": set(),
    "events": {"errors"},
    "kernels": set(),
    "storage": {"errors", "events"},
    "metrics": {"errors", "events", "visible"},
    "model": MODEL,
    "plan": {"errors", "events", "kernels"},
    "boundary": {"errors", "model"},
    "loading": {"errors", "events"},
    "checkpoint/format": FORMAT,
    "checkpoint/planning": {*FORMAT, "checkpoint/format", "plan"},
    "checkpoint/tracking": {"errors", "events", "kernels", "model"},
    "checkpoint/selecting": {"checkpoint/tracking", "errors", "kernels", "model"},
    "checkpoint/store": STORE,
    "checkpoint/saving": {
        *STORE, "checkpoint/selecting", "checkpoint/store", "deprecation", "loading"
    },
    "checkpoint/restoring": {
        *STORE, "boundary", "checkpoint/store", "checkpoint/tracking", "loading", "plan"
    },
    "checkpoint/grid": {*STORE, "checkpoint/restoring", "checkpoint/store"},
    "checkpoint/ranks": {*STORE, "checkpoint/saving", "checkpoint/store"},
    "checkpoint/preempting": {
        "checkpoint/planning", "checkpoint/ranks", "checkpoint/saving", "errors", "events"
    },
}  # fmt: skip
CHECKPOINT = {part for part in ALLOWED if part.startswith("checkpoint/")}
BELOW = {"boundary", "errors", "events", "kernels", "loading", "model", "plan", "storage"}
ALLOWED["checkpoint"] = {*BELOW, *CHECKPOINT, "deprecation"}
ALLOWED["interchange"] = {*ALLOWED["checkpoint"], "checkpoint"}
ALLOWED["cluster"] = {*ALLOWED["checkpoint"], "checkpoint"}
ALLOWED["integrations"] = {*ALLOWED["checkpoint"], "checkpoint"}
ALLOWED["lightning"] = {"integrations"}
ALLOWED["recsys"] = {*ALLOWED["checkpoint"], "checkpoint", "cluster"}
ALLOWED["report"] = {*ALLOWED["recsys"], "interchange", "recsys", "visible"}
ALLOWED["research"] = {*ALLOWED["report"], "report"}
ALLOWED["cli"] = {*ALLOWED["research"], "metrics", "research"}
MODULES_MAX = 12  # of a folder, without its __init__.py
KERNEL_PACKAGES = {
    "__future__", "typing", "collections", "dataclasses", "numpy", "numba", "holdfast"
}  # fmt: skip

# Libraries that only one module may know, so that they can be replaced there.
ONLY_IN = {
    "lightning": {"integrations/lightning.py"},
    "ray": {"cluster/rayengine.py"},
    "pyarrow.flight": {"cluster/wire.py"},
    "torchrec": {"model/torchrec/claim.py", "model/torchrec/optimizers.py"},
    "fbgemm_gpu": {"model/torchrec/fused.py"},
}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


MODULES = [p for p in sorted(ROOT.rglob("*.py")) if p != ROOT / "__init__.py"]


def part_of(path: Path) -> str:
    """The part that a module below ROOT belongs to."""
    first, *others = path.relative_to(ROOT).with_suffix("").parts
    is_stage = first == "checkpoint" and len(others) > 1
    return f"{first}/{others[0]}" if is_stage else first


def file_of(name: str) -> Path:
    """The module that an imported name is of, or is."""
    found = ROOT
    for step in name.split(".")[1:]:
        if (found / f"{step}.py").exists():
            return found / f"{step}.py"
        if not (found / step).is_dir():
            break
        found = found / step
    return found / "__init__.py"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    files = {file_of(name) for name in imported(path) if name.startswith("holdfast.")}
    parts = {part_of(file) for file in files if file != ROOT / "__init__.py"}
    assert parts - {part_of(path)} <= ALLOWED[part_of(path)]


def test_every_part_is_in_the_table_and_the_table_has_no_other() -> None:
    assert {part_of(path) for path in MODULES} == set(ALLOWED)


FOLDERS = sorted({path.parent for path in MODULES})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_folder_is_small_and_says_what_it_is(folder: Path) -> None:
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    if folder.name != "cluster" or folder.parent != ROOT:
        assert len(modules) <= MODULES_MAX
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert text


KERNELS = [p for p in sorted((ROOT / "kernels").rglob("*.py")) if p.name != "compiling.py"]


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: p.name)
def test_kernels_import_numpy_and_numba_alone(path: Path) -> None:
    assert {name.split(".")[0] for name in imported(path)} <= KERNEL_PACKAGES


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_stored_or_received_is_unpickled(path: Path) -> None:
    names = imported(path)
    assert not {"pickle", "shelve", "marshal", "dill"} & {name.split(".")[0] for name in names}
    calls = {
        ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }  # fmt: skip
    assert not {"eval", "exec", "torch.load"} & calls


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_is_installed_needs_neither_benchmarks_nor_tests(path: Path) -> None:
    assert not {name.split(".")[0] for name in imported(path)} & {"benchmarks", "tests"}


@pytest.mark.parametrize("library", ONLY_IN)
def test_an_engine_or_a_transport_is_imported_in_one_place(library: str) -> None:
    importers = {
        path.relative_to(ROOT).as_posix()
        for path in MODULES
        if any(f"{name}.".startswith(f"{library}.") for name in imported(path))
    }
    assert importers == ONLY_IN[library]


@pytest.mark.parametrize("module", ["server", "cluster", "child", "rayengine"])
def test_servers_and_drivers_load_neither_torch_nor_ray(module: str) -> None:
    code = (
        f"import sys, holdfast.cluster.{module}\n"
        "print(sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("[]\n", "")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nobody_takes_hold_of_every_object(path: Path) -> None:
    """A tuple that another thread builds from a generator would fail (loading/unfollowed.py)."""
    calls = {
        ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }  # fmt: skip
    assert "gc.get_objects" not in calls
