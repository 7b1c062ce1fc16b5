"""What makes the pictures and the tables of docs/.  From the repository's root: python -m experiments.timelines"""
