"""A solution of each exercise.  Try yours first."""
