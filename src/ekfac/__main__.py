"""``python -m ekfac``: the command ``ekfac``."""

from ekfac.cli.entry import main

if __name__ == "__main__":
    main()
