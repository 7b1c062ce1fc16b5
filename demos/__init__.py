"""Programs to try, with nothing to fill in; `mistakes` and `collectives` are those of the pages in docs/.

python -m demos.mistakes no_ddp wrong     # docs/mistakes.md
python -m demos.collectives all_reduce    # docs/collectives.md
"""
