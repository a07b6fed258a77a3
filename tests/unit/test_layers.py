"""The layout of folders is the architecture: imports point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

ROOT = Path(holdfast.__file__).parent

# What each part may import of holdfast; a part is a folder, or a module at the top.
ALLOWED = {
    "errors": set(),
    "events": {"errors"},
    "metrics": {"errors", "events"},
    "placement": {"errors", "kernels"},
    "schema": {"errors"},
    "names": set(),
    "plan": {"errors", "events", "kernels"},
    "loading": {"errors", "events"},
    "kernels": set(),
    "storage": {"errors", "events"},
    "dtypes": {"schema"},
    "devices": set(),
    "tensors": {"devices", "schema"},
    "pieces": {"errors", "schema"},
    "tables": {
        "devices",
        "dtypes",
        "errors",
        "events",
        "kernels",
        "names",
        "pieces",
        "placement",
        "schema",
        "tensors",
    },
    "modelstate": {"errors", "names", "pieces", "schema", "tables", "tensors"},
    "torchrec": {"devices", "errors", "names", "pieces", "tables"},
}
for upper in (
    "checkpoint",
    "interchange",
    "lightning",
    "integrations",
    "cluster",
    "recsys",
    "report",
    "bench",
):
    ALLOWED[upper] = set(ALLOWED)
ALLOWED["cli"] = set(ALLOWED)
KERNEL_PACKAGES = {
    "__future__", "typing", "collections", "dataclasses", "numpy", "numba", "holdfast"
}  # fmt: skip

# Libraries that only one module may know, so that they can be replaced there.
ONLY_IN = {
    "lightning": {"lightning.py"},
    "ray": {"cluster/rayengine.py"},
    "pyarrow.flight": {"cluster/wire.py"},
    "torchrec": {
        "torchrec/claim.py",
        "torchrec/optimizers.py",
        "bench/torchrecmodel.py",
    },
    "fbgemm_gpu": {"torchrec/fused.py", "bench/torchrecmodel.py"},
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


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    ours = {
        name.split(".")[1] for name in imported(path) if name.startswith("holdfast.")
    } - {part}  # fmt: skip
    assert ours & set(ALLOWED) <= ALLOWED[part]


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("*.py")), ids=lambda p: p.name)
def test_kernels_import_numpy_and_numba_alone(path: Path) -> None:
    assert {name.split(".")[0] for name in imported(path)} <= KERNEL_PACKAGES


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_stored_or_received_is_unpickled(path: Path) -> None:
    names = imported(path)
    place = path.relative_to(ROOT).as_posix()
    if place != "interchange/restricted.py":  # subclasses the reader; knows no class but its own
        assert not {"pickle", "shelve", "marshal", "dill"} & {name.split(".")[0] for name in names}
    calls = {
        ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    }  # fmt: skip
    if "bench" not in path.parts:  # the peers there use it on files they have just written
        assert not {"eval", "exec"} & calls
        loads = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
        ]
        assert not loads or place.startswith("interchange/")  # files of other programs
        for node in loads:
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert given.get("weights_only") == "True"


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
