"""A callback for Lightning: a Trainer's run survives, by steps, beside Lightning's own checkpoints.

    trainer = Trainer(callbacks=[HoldfastCallback("runs/mine", every=1000)], ...)
    trainer.fit(module, loader)  # the same again after a kill: goes on where it was

It makes a Checkpointer when the trainer's optimizers exist, loads the last checkpoint, and counts a
step after each batch in which an optimizer stepped. The trainer's progress, schedulers, precision
and a loader with ``state_dict`` go along.

Invariants:
- A checkpoint is never taken between gradients and their step, not for SIGTERM either.
- Where the epoch was left, random numbers go on as they would have: what making the loader's
  iterator draws a second time is undone before the first batch.

Not here: many processes; one callback saves one process's model. Validation: where an epoch ended
with one after the checkpoint, random numbers of the next epoch may be others than without a stop.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from holdfast.checkpoint import run as runs
from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.settings import SettingsKeywords
from holdfast.errors import HoldfastError, InvalidRequestError, NotFoundError
from holdfast.loading.generators import Generator, load_rng_state, rng_state
from holdfast.loading.stateful import Stateful, like_held

_FINISHED = "_iterator_finished"  # as torchdata's loaders call it


class HoldfastCallback(Callback):
    """Saves a Trainer's run by steps and resumes it; ``settings`` are a Checkpointer's."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        extras: Mapping[str, Stateful | Generator] | None = None,
        **settings: Unpack[SettingsKeywords],
    ) -> None:
        """``extras`` and ``settings``: as a Checkpointer's."""
        super().__init__()
        self._url = url
        self._save_last = settings.pop("save_last", True)
        self._extras = dict(extras or {})
        self._settings = settings
        self._global_step = 0
        self._rng: dict[str, Any] | None = None
        self._loaders: list[dict[str, Any]] = []
        self.checkpointer: Checkpointer | None = None

    @property
    def state_key(self) -> str:
        """Its name in Lightning's own checkpoints, where it keeps nothing."""
        return f"HoldfastCallback[{os.fspath(self._url)}]"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch the module and load the last checkpoint, before Lightning begins.

        Raises:
            InvalidRequestError: several processes; or ``ckpt_path`` was given and there is a run.
        """
        if trainer.world_size != 1:
            raise InvalidRequestError(
                "the callback saves one process's model", processes=trainer.world_size,
                todo="use one device, or a Checkpointer on every rank",
            )  # fmt: skip
        if trainer.ckpt_path is not None and self._has_run():
            raise InvalidRequestError(
                "both ckpt_path and the run at the url say where to begin",
                ckpt_path=str(trainer.ckpt_path), url=os.fspath(self._url),
                todo="leave ckpt_path out, or give a new url",
            )  # fmt: skip
        progress = {"trainer": _Progress(trainer), **self._extras}
        self.checkpointer = Checkpointer(
            self._url,
            model=pl_module,
            optimizer=list(trainer.optimizers),
            extras=progress,
            **self._settings,
        )
        self._rng, self._loaders = None, []
        self.checkpointer._reader.place_elsewhere()  # Lightning does, by its own states
        self.checkpointer._preemption.unlisten()  # until Lightning has installed its own handler
        if self.checkpointer.latest_step() is not None:
            self.checkpointer.resume()
            self._rng = rng_state()
            loop = trainer.fit_loop
            if loop.epoch_loop.batch_progress.is_last_batch:
                self._loaders, loop._combined_loader_states_to_load = (
                    loop._combined_loader_states_to_load, []
                )  # fmt: skip

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Where counting begins; Lightning has loaded its own by now."""
        self._global_step = trainer.global_step
        if self.checkpointer is not None:
            # Lightning stops after the batch in which SIGTERM comes, also between gradients and
            # their step. We hear of it first, save a step, and hand the signal on to Lightning.
            self.checkpointer._preemption.listen()
        if self._loaders:
            self._begin_epoch(trainer)

    def _begin_epoch(self, trainer: Trainer) -> None:
        """An epoch was over: the next one's iterator is made once more, for what it draws."""
        loop = trainer.fit_loop
        assert loop._data_fetcher is not None and loop._combined_loader is not None
        assert self._rng is not None
        load_rng_state(self._rng)
        iter(loop._data_fetcher)
        self._rng = rng_state()
        loop._combined_loader._load_state_dicts(self._loaders)
        iter(loop._data_fetcher)
        self._loaders = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Before the first batch after a resume: random numbers as they were."""
        if self._rng is not None:
            load_rng_state(self._rng)
            self._rng = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a step where an optimizer stepped; save when one is due."""
        if trainer.global_step != self._global_step and self.checkpointer is not None:
            self._global_step = trainer.global_step
            self.checkpointer.step()
            if self._save_last and _is_last(trainer):  # Lightning counts its epoch as over after it
                self.checkpointer.save()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, if it is not saved."""
        ck = self.checkpointer
        if ck is None:
            return
        ck.wait()
        if self._save_last and ck.current_step and ck.current_step not in ck.all_steps():
            ck.save()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the last save, let go of the module."""
        if self.checkpointer is not None:
            self.checkpointer.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """The same when training failed; its own error comes first."""
        try:
            self.on_fit_end(trainer, pl_module)
        except HoldfastError as failure:
            exception.add_note(f"holdfast: the last save failed too: {failure}")

    def _has_run(self) -> bool:
        options = self._settings.get("storage_options")
        try:
            return bool(runs.open(self._url, storage_options=options).steps)
        except NotFoundError:
            return False


def _is_last(trainer: Trainer) -> bool:
    """Whether the batch that ends now is the last of all, as far as it is known before."""
    is_epochs_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    epochs, steps = trainer.max_epochs, trainer.max_steps
    return (0 <= steps <= trainer.global_step) or (
        is_epochs_last and epochs is not None and 0 <= epochs <= trainer.current_epoch + 1
    )


class _Progress:
    """What a trainer knows beyond its model and optimizers."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Loops (with the loader's place), schedulers, precision."""
        trainer = self._trainer
        return {
            "fit_loop": self._loops(),
            "lr_schedulers": [_plain(c.scheduler.state_dict()) for c in self._schedulers],
            "precision": trainer.precision_plugin.state_dict(),
        }

    def _loops(self) -> dict[str, Any]:
        loop = self._trainer.fit_loop
        state = dict(loop.state_dict())
        own = dict(state["state_dict"])
        loaders = own.get("combined_loader", [])
        if loop.epoch_loop.batch_progress.is_last_batch and loaders:
            # The loader has given all and does not know yet that this was the end: its place is
            # the next epoch's beginning, not an epoch without batches.
            own["combined_loader"] = [
                {**each, _FINISHED: True} if _FINISHED in each else each for each in loaders
            ]
            state["state_dict"] = own
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring them back."""
        trainer = self._trainer
        if len(state["lr_schedulers"]) != len(self._schedulers):
            raise InvalidRequestError(
                "the checkpoint was taken with other schedulers",
                checkpoint=len(state["lr_schedulers"]), given=len(self._schedulers),
            )  # fmt: skip
        trainer.fit_loop.load_state_dict(dict(state["fit_loop"]))
        for config, saved in zip(self._schedulers, state["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(like_held(config.scheduler, saved))
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])

    @property
    def _schedulers(self) -> list[Any]:
        return list(self._trainer.lr_scheduler_configs)


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """A scheduler's state without what it can make again (functions, a bound method)."""
    return {name: value for name, value in state.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str | bytes | torch.Tensor)
