"""The paper: its tables, figures and text as LaTeX, made from the results of the studies."""

from oneflare.report.paper.build import Built, build_pdf
from oneflare.report.paper.material import Material, read_material
from oneflare.report.paper.writing import write_paper

__all__ = ["Built", "Material", "build_pdf", "read_material", "write_paper"]
