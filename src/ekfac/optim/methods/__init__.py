"""What is done with a block's gradient: EKFAC's eigenbasis with its rules, KFAC's inverses, damping."""
