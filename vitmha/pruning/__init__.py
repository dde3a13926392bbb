"""Head importance, pruning, grouping, and reconstruction of what remains."""
