"""Timing, apart from the tests: ratios measured in one run. `make bench`, or `oneflare bench`."""
