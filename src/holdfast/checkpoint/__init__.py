"""Checkpoints of a live model: what a training loop holds, on top of a folder for each stage.

    tracking -> planning, selecting -> saving -> store -> format      a save
    store -> format -> restoring                                      a restore
    store -> grid -> store                                            rounds of extraction (IncrCP)

checkpointer.py joins the stages for one process, ranks/ for several. run.py, diff.py and verify.py
read a stored run without a model.
"""
