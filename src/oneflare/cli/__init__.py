"""The command line. Each command parses its words, calls the library and prints; heavy imports happen inside it."""
