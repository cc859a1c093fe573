"""The sizes a captured model takes: free, fixed or bound, and which line of the user's made them so."""
