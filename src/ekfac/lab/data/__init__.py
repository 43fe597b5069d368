"""Datasets by name, and the files behind them."""
