"""Measurements: what Holdfast costs and saves, always beside a named peer or a physical limit.

    machine, workload -> kernels overhead tracking reduction peers accuracy -> results -> document

``run.run_all`` measures the sections and writes the document. Every speed is a ratio of things
measured in turns, in one run, on one machine; a target that is missed is shown as missed.

Not here: whether the numbers returned are right (the tests of each module).
"""
