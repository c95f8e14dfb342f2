"""Weights that change while requests run, and the version of the weights that draws each token."""
