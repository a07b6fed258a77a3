"""Commands that take something away from a stored run: they say what, and ask first."""
