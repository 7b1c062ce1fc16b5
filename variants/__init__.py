"""Branches of mnist_ddp.py, one idea each.  Started from the repository's root: python -m variants.mnist_by_hand"""
