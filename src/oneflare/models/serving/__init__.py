"""A model over HTTP: the application, its limits, and the requests that it accepts."""
