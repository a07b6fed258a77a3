"""What a user sees of the package: names, settings, errors, and the names of 0.4."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast import errors
from holdfast.checkpoint import settings as settings_module
from holdfast.checkpoint.settings import Settings, SettingsKeywords


def test_dir_lists_the_api_and_nothing_else() -> None:
    assert set(dir(hf)) == {*hf.__all__, "open", "__version__"}
    for name in dir(hf):
        assert getattr(hf, name) is not None


def test_a_star_import_hides_no_builtin() -> None:
    assert not set(hf.__all__) & set(dir(builtins))


def test_every_error_can_be_imported() -> None:
    kinds = {
        name for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, (hf.HoldfastError, hf.HoldfastWarning))
    }  # fmt: skip
    assert kinds <= set(hf.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="checkpointer_"):
        hf.checkpointer_  # noqa: B018


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, holdfast; dir(holdfast); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_keywords_of_a_checkpointer_are_its_settings_one_by_one() -> None:
    wanted = typing.get_type_hints(Settings, vars(settings_module), {"ProcessGroup": object})
    given = typing.get_type_hints(SettingsKeywords, vars(settings_module), {"ProcessGroup": object})
    assert given == wanted


def test_every_setting_is_documented_in_one_line() -> None:
    lines = inspect.getsource(Settings).splitlines()
    for field in dataclasses.fields(Settings):
        at = next(n for n, line in enumerate(lines) if line.startswith(f"    {field.name}: "))
        text = lines[at + 1].strip()
        assert text.startswith('"""') and text.endswith('"""'), field.name


@pytest.mark.parametrize(
    ("given", "meant"),
    [({"stratgy": "full"}, "strategy"), ({"strategy": "incrp"}, "incrcp"),
     ({"on_busy": "cancle"}, "cancel"), ({"codec": "adaptiv4"}, "adaptive4")],
)  # fmt: skip
def test_a_mistyped_name_is_refused_with_a_close_one(
    tmp_path: Path, given: dict[str, typing.Any], meant: str
) -> None:
    model = nn.Embedding(5, 2)
    with pytest.raises(hf.InvalidRequestError, match=f"did you mean {meant!r}"):
        hf.Checkpointer(tmp_path, model=model, **given)


def test_names_of_0_4_work_and_name_the_new_ones(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"holdfast\.PendingSave"):
        assert hf.Save is hf.PendingSave
    model = nn.Embedding(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizer) as ck:
        save = ck.save()
        with pytest.warns(DeprecationWarning, match="result"):
            stats = save.durable(timeout=60)
        assert stats == save.result() == save.stats
        with pytest.warns(DeprecationWarning, match="done"):
            assert save.is_done and save.done()
        with pytest.warns(DeprecationWarning, match="wait"):
            assert not save.has_failed
        with pytest.warns(DeprecationWarning, match="in memory"):
            save.staged()
        with pytest.warns(DeprecationWarning, match="is_rollup"):
            assert not stats.is_floor
    with pytest.warns(DeprecationWarning, match="rollups"):
        assert hf.Strategy("mine", "consecutive", None, floors=True).has_rollups
    with pytest.warns(DeprecationWarning, match=r"holdfast\.Shard"):
        shards = {"weight": hf.Piece(9, 2, range(5))}
    with pytest.warns(DeprecationWarning, match="shards="):
        hf.Checkpointer(tmp_path / "shards", model=model, optimizer=optimizer, pieces=shards)


def test_the_handle_of_a_save_has_what_a_user_needs() -> None:
    public = {name for name in dir(hf.PendingSave) if not name.startswith("_")}
    of_0_4 = {"durable", "has_failed", "is_done", "staged"}
    assert public == {"cancel", "done", "result", "stats", "step", "wait"} | of_0_4


def test_a_cancelled_save_says_so_and_waiting_raises(tmp_path: Path) -> None:
    model = nn.Embedding(5, 2)
    with hf.Checkpointer(tmp_path, model=model, save_last=False) as ck:
        save = ck.save()
        if save.cancel():  # unless its commit had begun
            with pytest.raises(hf.SaveCancelledError):
                save.wait()
        else:
            assert save.result().bytes > 0
        assert save.done() and "step 0" in repr(save)
