"""Masked sums in a federation by file: the roster, the members' secrets, the request, the releases, the opened total.

A member takes three steps, each of which gives one file for the coordinator: it joins (an enrolment), trains (the
masked upload) and releases (its part in opening the total). The coordinator signs the roster, closes the round with one
request, and fuses. `oneflare.upload.masking` holds the arithmetic.
"""
