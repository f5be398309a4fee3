"""Figures, tables and one self-contained HTML page from the files of a run, a comparison or a study."""

from oneflare.report.page import read_story, write_comparison, write_report, write_study

__all__ = ["read_story", "write_comparison", "write_report", "write_study"]
