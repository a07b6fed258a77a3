"""The studies of the papers, repeated: emulated failures in real training (CPR), and what they
cost.

Nothing that trains or serves depends on this folder.
"""
