"""`python -m bubblescope` is the `bubblescope` command."""

from bubblescope.cli.main import main

if __name__ == "__main__":
    main()
