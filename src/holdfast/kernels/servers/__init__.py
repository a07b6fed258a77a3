"""What embedding servers do to rows: optimizers, parity, slabs, first values, relayed bytes."""
