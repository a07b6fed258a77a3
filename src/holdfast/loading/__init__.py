"""Reading training data so that a resumed run reads the same batches as an uninterrupted one.

A ``ResumableReader`` stands between any loader and the training loop. It counts the batches that
were handed out and those that were trained, and it records the random generators that shuffling and
augmentation draw from. Its state goes into every checkpoint; loading that state brings the loader
to the batch after the last trained one. ``GrantedLoader`` is a loader of our own that reads up to
the next checkpoint and no further. A ``Checkpointer`` holds one reader, in a ``ReaderSlot``.
"""
