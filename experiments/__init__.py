"""Programs that make the pictures and tables of docs/.  From the repository's root: python -m experiments.timelines"""
