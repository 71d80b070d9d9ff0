"""Solvers of other people's papers, written here over `placemat.problem.Problem`, to measure ours against.

Each takes a problem and a budget and gives an `Answer`; the referee `placemat.simulate` prices whatever they hand in.
"""
