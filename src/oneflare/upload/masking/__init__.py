"""Masked sums: what a member adds to its sums so that only the total over members can be read.

The protocol is that of Bonawitz et al. (2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning"),
carried by files. A member i with sums x_i, in fixed point modulo 2^64, uploads

    y_i = x_i + PRG(b_i) + sum over j > i of PRG(s_ij) - sum over j < i of PRG(s_ij)    (mod 2^64).

s_ij is a seed that only i and j can compute (`masks`); these terms cancel in the total. b_i is drawn anew for each
upload and shared among all members (`shamir`), each share sealed for one of them. Whoever has t shares of the b_i of
all who uploaded, and the seeds between them and those who did not, learns the total and nothing else.
"""
