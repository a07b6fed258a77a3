"""Checkpoints of other programs: a step leaves as a file they load, theirs become a run's base.

    out:  a run's step -> weightsfile.py (safetensors) | handout.py -> torchfile.py, dcpfolder.py
    in:   torchfile.py, dcpfolder.py (by archive/) -> source.py -> adopt.py -> importer.py
          -> dense.py, new_run.py -> a run's base

Files of other programs carry no checksums that we could check, so their numbers are taken at their
word. Nothing else is: what they claim is checked against what it can be and what it may cost, and
nothing in them is run. What torch pickles is read by archive/, which knows no class but its own
stand-ins.
"""
