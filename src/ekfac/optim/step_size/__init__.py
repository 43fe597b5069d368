"""What acts on the length of a step, one file each."""
