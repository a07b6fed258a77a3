"""Which of the batches that were handed out are trained."""
