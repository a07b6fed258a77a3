"""Save: copy rows while training waits, then encode, store and commit them in the background.

    SavePlan -> snapshot.py (the stall) -> staged.py -> store_rows.py -> commit.py

save.py has the order of these steps, pending.py the handle that a user gets.
"""
