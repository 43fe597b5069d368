"""Training on several processes: sharing statistics, ownership of blocks, and keeping replicas equal."""
