"""The version of the package, and of the arithmetic behind its figures.

Raise one of the two numbers whenever the same experiment would give other figures than before: TRAINING_ARITHMETIC for
what clients train and upload, FUSION_ARITHMETIC for what is computed from uploads (models, metrics, diagnostics). A run
with another training arithmetic is refused; figures with another fusion arithmetic are made anew from its uploads.
"""

__version__ = "0.1.0"
TRAINING_ARITHMETIC = 1
FUSION_ARITHMETIC = 4
"""2: rules get raw features, where 1 brought every client's features to unit length before the sum; 3: density ratios
are calibrated; 4: networks count beside statistics as far as members know their own images"""
