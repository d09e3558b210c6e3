"""The page at /: the files that a browser gets, and what it is told of the engine while it looks."""
