"""One client's isolated work: its job, training, cohorts of small clients, what it measures for the server."""
