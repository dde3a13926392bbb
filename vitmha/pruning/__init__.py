"""Head importance, pruning, conversion to grouped-query attention, and reconstruction of the remaining weights."""
