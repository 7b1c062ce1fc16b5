"""The programs that benchmark.py compares with.  python -m experiments.baselines.limit --nproc 2"""
