"""Decide, without doing: base or delta, how many bits, when a save is due, what is kept.

Pure functions of plain values. Each returns its decision with the reason.
"""
