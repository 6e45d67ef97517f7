"""A small scripted coding agent: the demo's toolkit layer. Pure Python, no dependencies.

It runs the failing tests, traces which lines they reach, edits those lines one at a time, and keeps the
first edit with which the tests pass.
"""
