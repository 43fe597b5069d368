"""h and delta, recorded during forward and backward passes."""
