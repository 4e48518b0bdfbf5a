"""`python -m rayneuron` is the command line."""

from rayneuron.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
