"""Training loops that others wrote: what makes them survive without an edit inside the loop."""
