"""``python -m callboard``: the ``callboard`` command."""

from server.cli import main

if __name__ == "__main__":
    main()
