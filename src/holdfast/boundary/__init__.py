"""The one place where untrusted becomes trusted.

What a catalog, an object, dense state or a file of another program claims is checked here against
what it can be and against what it may cost, before anything acts on it.
"""
