"""What the backward passes left of each block, and when its factors and basis are renewed."""
