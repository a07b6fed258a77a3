"""Run a client's script, die at a chosen step, or tell how it ended.

python run_client.py SCRIPT URL OUT [KILL_AT [wait]]

The process kills itself (SIGKILL) inside its KILL_AT-th ``optimizer.step()``; with ``wait`` when
the saves that are running then are durable. Else OUT gets the live model and optimizer, by
torch.save, and how many steps there were.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import holdfast as hf


def main(script: str, url: str, out: str, kill_at: int, waits: bool) -> None:
    """Run the script as its own program, with ``hf.attach`` and optimizer steps seen."""
    attach = hf.attach
    seen: dict[str, Any] = {"steps": 0}

    def remember(optimizer: Any, *args: Any, **kwargs: Any) -> hf.Attachment:
        ck = attach(optimizer, *args, **kwargs)
        seen.update(ck=ck, optimizer=optimizer, model=kwargs["model"])
        return ck

    def stepped(*_: Any) -> None:
        seen["steps"] += 1
        if seen["steps"] == kill_at:
            if waits:
                seen["ck"].checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    hf.attach = remember
    register_optimizer_step_post_hook(stepped)
    sys.argv = [script, url]
    runpy.run_path(script, run_name="__main__")
    ck: hf.Attachment = seen["ck"]
    torch.save(
        {
            "model": seen["model"].state_dict(),
            "optimizer": seen["optimizer"].state_dict(),
            "resumed": ck.resumed_step,
            "trained": seen["steps"],
            "end": ck.current_step,
        },
        Path(out),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = sys.argv[4:]
    main(
        sys.argv[1], sys.argv[2], sys.argv[3], int(given[0]) if given else 0, given[1:] == ["wait"]
    )
