"""Layers that models share where their mathematics is the same."""
