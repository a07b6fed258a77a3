"""Choose the rows that a checkpoint saves: all, the changed ones, or the hottest of them (CPR)."""
