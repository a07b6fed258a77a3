"""The command line: ``holdfast train | demo | inspect | diff | verify | restore``.

Every command imports what it needs when it runs, so that ``--help`` answers at once.
"""
