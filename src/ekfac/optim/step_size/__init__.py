"""Everything that affects the length of a step, one file each."""
