"""Programs to learn from by trying.  From the repository's root: python -m exercises.mistakes set_epoch wrong"""
