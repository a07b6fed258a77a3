"""Many small segments in one call: their headers, their dead rows, their rows into tables."""
