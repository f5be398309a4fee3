"""Methods by name: a recipe sets objective, anchors, controller and fusions, and every option can be overridden.

`recipes` is plain data and imports at once; `resolve` checks every name and therefore loads the library.
"""

from oneflare.methods.recipes import METHODS, Method, find_method, register

__all__ = ["METHODS", "Method", "find_method", "register"]
