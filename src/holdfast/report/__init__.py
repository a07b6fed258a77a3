"""What happened and what exists, for people: from events and catalogs to tables, panels, dicts.

    events, catalog values -> values with a ``to_dict`` -> rich renderables, or JSON

Every module has the same two halves: a frozen value that holds the facts (its ``to_dict`` is what
``--json`` prints) and functions that turn the value into something rich can draw.

Not here: reading runs and following training (cli/), printing.
"""
