"""The `stochflow` command: words to values, and what is shown. The only package that prints."""
