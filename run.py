"""Run one experiment: ``python run.py method=refrag model=hybrid`` (``--help`` lists everything)."""

from refragkit.experiment import main

if __name__ == "__main__":
    main()
