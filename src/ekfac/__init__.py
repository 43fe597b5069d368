"""Natural-gradient training for PyTorch in a Kronecker-factored eigenbasis."""
