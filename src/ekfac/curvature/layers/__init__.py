"""Kinds of layers: how each turns its input and output gradient into h and delta."""
