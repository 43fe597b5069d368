"""The maths: layers, factors, eigenbasis and scaling. It knows nothing of optimizers."""
