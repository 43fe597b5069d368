"""Several processes that train together: who shares statistics, who owns a block, and how replicas stay equal."""
