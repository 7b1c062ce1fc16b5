"""Exercises that check themselves, and programs to try out: see README.md.  python -m exercises.check shard"""
