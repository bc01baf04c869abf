"""What `scripts/train.py` is made of: the command line, the run folder, what is shown and how a run is stopped."""
