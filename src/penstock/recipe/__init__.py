"""Recipes: everything that defines a run, the named ones, and their files."""
