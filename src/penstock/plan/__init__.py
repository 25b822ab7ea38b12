"""What a run needs and how long it takes, computed without a GPU."""
