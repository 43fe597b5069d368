"""The command ``ekfac``: thin, every command parses, calls the lab and prints."""
