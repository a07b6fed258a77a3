"""Numbers in few bits: 16-bit floats, uniform, logarithmic and k-means codes, packed."""
