"""Kinds of layers: what each makes of its input and of its output's gradient."""
