"""`python -m vitmha` is the command `vitmha`."""

from vitmha.cli import main

if __name__ == "__main__":
    main()
