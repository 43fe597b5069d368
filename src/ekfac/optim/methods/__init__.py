"""How a block's gradient is preconditioned: EKFAC's eigenbasis with its rules, KFAC's inverses, damping."""
