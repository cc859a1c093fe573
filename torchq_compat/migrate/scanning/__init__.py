"""Apply the rewrites to files: scan a whole tree, rewrite one text, show findings."""
