"""Presentation of results to people and scripts: tables, JSON, plots, live views."""
