"""Files through the rewrites: a whole tree scanned, one text rewritten, findings shown."""
