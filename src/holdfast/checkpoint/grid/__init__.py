"""The 2-D chunk grid (IncrCP): move dead row versions out of the way of restores.

    decide.py (pure: what to move) -> extract.py (one round) <- extractor.py (when rounds run)

A restore is right whatever was moved: deletion vectors name the dead rows that stayed.
"""
