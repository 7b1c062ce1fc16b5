"""The laboratory: whatever measures.  Started from the repository's root: python -m experiments.benchmark"""
