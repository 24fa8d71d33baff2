"""Entry point of the command line, `python -m torch_backplane`; see cli/."""

from torch_backplane.cli import main

if __name__ == "__main__":
    main()
