"""Mutants of the oracles: would the suite see it if the truth itself were wrong?"""
