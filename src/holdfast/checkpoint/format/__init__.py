"""What is stored, as bytes and as values: codecs, segments, objects, deletion vectors, catalogs.

No policy and no storage: a module here turns values into bytes, or bytes that may be damaged or
forged into checked values. docs/format.md describes each byte.
"""
