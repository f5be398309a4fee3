"""Fusions that teach one network what a fused model knows."""

from oneflare.fusion.distillation import coboosting, datafree, public  # noqa: F401  (registers)
