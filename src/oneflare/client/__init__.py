"""One client's isolated work: its job, its training, cohorts of small clients, and what it measures for the server."""
