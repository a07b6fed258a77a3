"""What ``torch.save`` writes, read without torch's reader: nothing is run, nothing is decompressed.

    files.py (bytes of a file) -> zips.py (records) -> pickles.py (values), with the names that
    names.py knows -> structure.py: plain values, and a ``StoredTensor`` (tensors.py) for a tensor

What is read is bounded by the file it comes from (boundary/budget.py): memory is taken out of an
account before it is allocated, a tensor lies inside its record, a record inside its archive.
"""
