"""Restore any step: plan the reads, check each row, decode, scatter into arrays or a live model.

    catalog -> fetch.py -> row_check.py -> scatter.py -> rows in the caller's arrays

restore.py does this for whole tables, read_rows.py for some rows of one, load.py for a live model,
partial.py for the rows of servers that failed (CPR).
"""
