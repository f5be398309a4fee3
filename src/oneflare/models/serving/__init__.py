"""A model over HTTP: the application, its limits, and what it accepts as a request."""
