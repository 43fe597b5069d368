"""The command ``ekfac``: a thin layer in which every command parses, calls the lab and prints."""
