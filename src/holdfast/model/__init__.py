"""What a model consists of: tables with their row state, dense state, and who holds which rows.

    schema.py, dtypes.py       a table without its values
    shard.py, placement.py    which rows and floats a process or a server holds
    tables.py, model_state.py  a live model; adapters for TorchRec in torchrec/
    devices.py, tensors.py     from a device's memory to arrays

schema.py, dtypes.py, shard.py and placement.py need no torch: servers use them too.
"""
