"""Checkpoints of other programs: a step leaves as a file they load, theirs become a run's base.

    out:  a run's step -> weightsfile.py (safetensors) | handout.py -> torchfile.py, dcpfolder.py
    in:   torchfile.py, dcpfolder.py -> source.py -> adopt.py -> importer.py -> a run's base

Files of other programs are input that somebody vouches for: they carry no checksums that we could
check. Reading one can fail, never execute: what torch pickles is read by ``torch.load`` with
``weights_only=True`` or by ``restricted.py``, which knows no class but its own stand-ins.
"""
