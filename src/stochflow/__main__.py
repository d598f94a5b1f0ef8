"""`python -m stochflow` is the `stochflow` command."""

import os
import sys


def run() -> int:
    if sys.path and sys.path[0] in ("", os.getcwd()) and not sys.flags.safe_path:
        del sys.path[0]  # as the installed command: a module in the current folder must not stand in for another
    from stochflow.cli.commands import main

    return main()


if __name__ == "__main__":
    raise SystemExit(run())
