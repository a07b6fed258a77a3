"""The wheel works where nothing else of this checkout is."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: building leaves files beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
        "--disable-pip-version-check", "-w", str(folder), str(source))  # fmt: skip
    (found,) = folder.glob("*.whl")
    return found


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    modules = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    assert files == {*modules, "holdfast/py.typed"}


@pytest.mark.timeout(900)  # kernels are compiled anew
def test_a_training_runs_with_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    """In an environment with the wheel and what it depends on: not this checkout."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    (site,) = (tmp_path / "env/lib").glob("python*/site-packages")
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps",
        "--disable-pip-version-check", str(wheel))  # fmt: skip
    # A path in a .pth file is not searched for .pth files of its own: the checkout stays hidden.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    example = shutil.copy(ROOT / "examples/plain_pytorch.py", tmp_path)
    where = run(str(python), "-c", "import holdfast; print(holdfast.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(site)
    assert "starting at step 0" in run(str(python), str(example), "run", cwd=tmp_path)
    assert "starting at step 200" in run(str(python), str(example), "run", cwd=tmp_path)
    command = str(tmp_path / "env/bin/holdfast")
    assert run(command, "--version").startswith("holdfast 0.")
    assert "200" in run(command, "inspect", "run", "--json", cwd=tmp_path)
