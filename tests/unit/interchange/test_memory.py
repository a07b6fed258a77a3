"""Import and export never hold a table whole: memory stays far below a table's size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROWS, WIDTH = 400_000, 64  # 102 MB
BOUND_BYTES = 80 << 20

CODE = """
import sys, threading
from pathlib import Path
import torch
import holdfast as hf
from holdfast.interchange import new_run
from holdfast.interchange.dcpfolder import write_dcp
from holdfast.interchange.handout import hand_out
from holdfast.interchange.torchfile import write_torch

torch.set_num_threads(1)
new_run._STAGING_BUFFERS = 2  # so that a smaller table shows it
folder = Path(sys.argv[1])

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def measure(act):
    peak, is_over = 0, threading.Event()
    def watch():
        nonlocal peak
        while not is_over.wait(0.005):
            peak = max(peak, anonymous())
    before = anonymous()
    thread = threading.Thread(target=watch)
    thread.start()
    act()
    is_over.set()
    thread.join()
    print(peak - before)

def export(write, out):
    run = hf.open(folder / "run")
    write(hand_out(run, 0, weights_only=True), out, on_table=lambda done, total: None)

# kernels, pools and imports beforehand
torch.save({"e.weight": torch.ones(10, 4)}, folder / "small.pt")
hf.import_checkpoint(folder / "small.pt", folder / "small", tables=["*"])
measure(lambda: hf.import_checkpoint(folder / "big.pt", folder / "run", tables=["*"]))
measure(lambda: export(write_torch, folder / "out.pt"))
measure(lambda: export(write_dcp, folder / "out"))
measure(lambda: hf.import_checkpoint(folder / "out", folder / "again", tables=["*"]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_no_table_is_ever_whole_in_memory(tmp_path: Path) -> None:
    torch.save({"e.weight": torch.ones(ROWS, WIDTH)}, tmp_path / "big.pt")
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    peaks = [int(line) for line in found.stdout.split()]
    assert len(peaks) == 4
    assert max(peaks) < BOUND_BYTES < 4 * ROWS * WIDTH, peaks
