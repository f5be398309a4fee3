"""One experiment on one machine: its stages, the engines that run clients, observers, and kept results."""
