"""`python -m stochflow` is the `stochflow` command."""

from stochflow.cli.commands import main

if __name__ == "__main__":
    raise SystemExit(main())
