"""Sets of row ids, and rows gathered, hashed and compared."""
