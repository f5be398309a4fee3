"""Figures and one self-contained HTML page from the files of a run or a comparison."""

from oneflare.report.page import write_comparison, write_report

__all__ = ["write_comparison", "write_report"]
