"""Programs to try, with nothing to fill in; `mistakes` and `collectives` are those of the pages in docs/.

python -m demos.mistakes no_ddp wrong     # docs/mistakes.md
python -m demos.predict set_epoch         # the same, but you say first what they print
python -m demos.collectives all_reduce    # docs/collectives.md
"""
