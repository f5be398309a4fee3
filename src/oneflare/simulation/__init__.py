"""One experiment on one machine: its stages, where clients run, who watches, what is kept."""
