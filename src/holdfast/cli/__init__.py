"""The command line: ``holdfast train | demo | inspect | verify | restore | bench``.

Every command imports what it needs when it runs, so that ``--help`` answers at once.
"""
