"""A solution of each exercise.  Try your own first."""
