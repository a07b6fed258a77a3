"""The 2-D chunk grid (IncrCP): move dead row versions out of the way of restores.

    decide.py (pure rules) -> round_plan.py (what becomes of each chunk) -> extract.py (carry it
      out) -> swap.py (pure: the next catalog) -> one commit; extractor.py says when

A restore is right whatever was moved: deletion vectors name the dead rows that stayed.
"""
