"""The command line: parse, call, print. Heavy imports happen inside the commands."""
